"""Operations of the `cuda` device: each that has a kernel uses it. A lost fast path gives the same text, only later."""

from __future__ import annotations

import re
from types import CodeType

import pytest
import torch
from attrs import evolve

from slotline.core.device import TorchOps
from slotline.registry.contracts import DeviceOps
from slotline.testing.check import Run
from slotline.testing.environments.device_operations import OPERATIONS, Operation, run_operation
from slotline.testing.reference.device import Factory, HostDevice, descriptor
from slotline.testing.subject import subject_of

triton_ops = pytest.importorskip("slotline.backends.cuda.triton_ops", reason="the kernels are Triton's")

KERNELS = {
    "argmax": "likeliest_triton",
    "sample": "sample_into",
    "apply_bitmask": "ban_by_bitmask",
    "mark_unusable": "mark_unusable",
    "token_sampler": "FastSampler",
    "put_rows": "put_rows",
    "gather_rows": "take_rows",
    "advance_decode_batch": "advance_decode_batch",
    "subtract_rejected": "take_off_triton",
    "verify_drafts": "find_stood_triton",
    "fill_drafts": "keep_drafts_triton",
    "draft_places": "fill_places",
}
"""By operation: what its implementation calls."""
DERIVED = {"argmax_checked"}
"""Operations that torch's table makes of another operation."""


def names_in(code: CodeType) -> set[str]:
    """Return the global names in a function and in those that it defines."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*inner)


@pytest.mark.parametrize("name", KERNELS)
def test_an_operation_with_a_kernel_uses_it(name: str) -> None:
    own = triton_ops.TritonOps.__dict__[name]
    assert own is not getattr(TorchOps, name)
    assert KERNELS[name] in names_in(own.__code__)


def test_every_operation_of_the_contract_is_listed() -> None:
    names = {name for name in vars(DeviceOps) if not re.match("_|register", name)}
    assert names == set(KERNELS) | DERIVED


def test_a_step_calls_tritons_log_directly() -> None:
    from slotline.backends.cuda.compiler import TritonCompiler
    from slotline.kernels import triton_precompile

    assert TritonCompiler("cuda").log_to is triton_precompile.log_to
    assert TritonCompiler("cuda").leaving_out is triton_precompile.leaving_out


class InterpretedDevice(HostDevice):
    """The host's memory with the kernels, which Triton interprets there."""

    @staticmethod
    def make_ops() -> TorchOps:
        ops: TorchOps = triton_ops.TritonOps("cpu")
        return ops


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are interpreted; `slotline conform` runs them on a GPU"
)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_operations_take_tensors_that_are_parts_of_others(operation: Operation) -> None:
    """Where a kernel takes whole tensors only, torch's operation takes the others."""
    subject = subject_of(evolve(descriptor, factory=Factory(InterpretedDevice)))
    run_operation(operation, Run(subject, {}, 0), 5, 40, "spread")
