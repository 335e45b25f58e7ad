"""L0 of communicators: descriptor, capabilities, factory, methods, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slotline.registry.capability import GraphSupport
from slotline.registry.contracts import CommunicatorCapabilities, CommunicatorContext
from slotline.registry.descriptor import Kind
from slotline.testing.check import Run
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.communicator import device_of
from slotline.testing.refusal_checks import UNKNOWN, beyond, register_part_refusals


def _context(run: Run) -> CommunicatorContext:
    return CommunicatorContext(
        contract=1, name="alone", ranks=(0,), rank=0, device=device_of(run.subject, 0), timeout=30.0
    )


@contextmanager
def _alone() -> Iterator[None]:
    """Have this process be the only rank of a process group, unless it belongs to one."""
    from torch import distributed

    if distributed.is_initialized():
        yield
        return
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


register_contract_checks(
    KindContract(kind=Kind.COMMUNICATOR, capabilities=CommunicatorCapabilities, context=_context, within=_alone)
)
register_part_refusals(
    Kind.COMMUNICATOR,
    {
        "devices": lambda _: ("cpu", "cuda", UNKNOWN),
        "dtypes": lambda _: ("float32", "bfloat16", "float16", UNKNOWN),
        "max_ranks": lambda subject: beyond(subject, "max_ranks"),
        "graphs": lambda _: tuple(GraphSupport),
        "batch_invariant": lambda _: (True,),
    },
)
