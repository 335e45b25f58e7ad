"""L0 of linear plugins: descriptor, capabilities, factory, methods, refusals."""

from __future__ import annotations

from typing import Any

from slotline.registry.capability import GraphSupport
from slotline.registry.contracts import ELEMENTS, LinearCapabilities, LinearContext
from slotline.registry.descriptor import Kind
from slotline.testing.check import Run
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.linear import dtypes_of, next_size, schemes_of
from slotline.testing.refusal_checks import UNKNOWN, register_part_refusals


def _context(run: Run) -> LinearContext:
    offer: Any = run.subject.capabilities
    scheme = next(iter(schemes_of(run.subject).values()))
    return LinearContext(
        contract=1,
        scheme=scheme,
        in_features=next_size(offer.in_features, 64, max(scheme.group[1], 1)),
        out_features=next_size(offer.out_features, 32, 1),
        dtype=dtypes_of(run.subject)[0],
        device=run.subject.device.type,
        max_tokens=16,
    )


register_contract_checks(KindContract(kind=Kind.LINEAR, capabilities=LinearCapabilities, context=_context))
register_part_refusals(
    Kind.LINEAR,
    {
        "devices": lambda _: ("cpu", "cuda", UNKNOWN),
        "dtypes": lambda _: ("float32", "bfloat16", "float16", UNKNOWN),
        "schemes": lambda _: (*ELEMENTS, UNKNOWN),
        "granularities": lambda _: ("tensor", "channel", "group", "block", UNKNOWN),
        "scale_groups": lambda _: (16, 32, 64, 128, 48, 7),
        "ragged": lambda _: (True,),
        "offsets": lambda _: (True,),
        "act_order": lambda _: (True,),
        "split_order": lambda _: (True,),
        "in_features": lambda _: (64, 63, 4096),
        "out_features": lambda _: (64, 63, 4096),
        "graphs": lambda _: tuple(GraphSupport),
        "batch_invariant": lambda _: (True,),
    },
)
