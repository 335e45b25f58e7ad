"""Gated norms: the kernel is the families' norm, and the pass takes it only where it is, else leaves the module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("triton")

from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from slotline.plugins.model_families.passes import gated_norm, rms_norm
from slotline.plugins.model_families.passes.equality import TOLERANCES, relative_difference
from slotline.plugins.model_families.passes.fused_kernels import EARLIEST, TritonKernels
from slotline.plugins.model_families.passes.gated_norm import FusedGatedNorm
from slotline.plugins.model_families.passes.target import Target, target_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if DEVICE == "cuda" else ()))  # not interpreted
KERNELS = TritonKernels(early=DEVICE == "cuda" and torch.cuda.get_device_capability() >= EARLIEST)


class Grouped(nn.Module):
    """The norm of Mamba-2: the gate first, then each group of a row for itself."""

    def __init__(self, size: int, group_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon, self.group_size = 1e-5, group_size

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        x = hidden_states.float()
        if gate is not None:
            x = x * functional.silu(gate.float())
        x = functional.rms_norm(x.unflatten(-1, (-1, self.group_size)), (self.group_size,), None, self.variance_epsilon)
        return self.weight * x.flatten(-2).to(hidden_states.dtype)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "one group": lambda: Grouped(96, 96),
    "three groups": lambda: Grouped(96, 32),
    "norm first": lambda: Qwen3NextRMSNormGated(96, eps=1e-5),
}


class UpsideDown(Grouped):
    """The weight of a gated norm, and another formula."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(gate, hidden_states)


def model_of(norm: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    holder = nn.Module()
    holder.norm = norm.to(DEVICE, dtype).eval()
    torch.nn.init.normal_(holder.norm.weight)
    return holder


def optimised(model: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    with torch.no_grad():
        return gated_norm.apply(model, Target(DEVICE, dtype, KERNELS, KERNELS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_the_kernel_is_the_families_gated_norm(kind: str, dtype: torch.dtype) -> None:
    model = model_of(NORMS[kind](), dtype)
    original = model.norm
    x, both = torch.randn(1, 7, 96, device=DEVICE, dtype=dtype), torch.randn(1, 7, 200, device=DEVICE, dtype=dtype)
    gate = both[..., 50:146]  # as a part of a projection
    with torch.no_grad():
        expected = original(x, gate)
        notes = optimised(model, dtype)
        found = model.norm(x, gate)
    assert notes == ("1 gated RMS norms in one call",)
    assert isinstance(model.norm, FusedGatedNorm)
    assert found.shape == expected.shape
    assert relative_difference(found, expected) <= TOLERANCES[dtype]


def test_no_rows_are_no_rows() -> None:
    model = model_of(NORMS["one group"]())
    optimised(model, torch.float32)
    assert model.norm(torch.empty(1, 0, 96, device=DEVICE), torch.empty(1, 0, 96, device=DEVICE)).shape == (1, 0, 96)


def test_another_formula_and_a_module_with_hooks_are_left_alone() -> None:
    other, heard = model_of(UpsideDown(96, 96)), model_of(NORMS["one group"]())
    heard.norm.register_forward_hook(lambda *_: None)
    for model in (other, heard):
        before = model.norm
        assert optimised(model, torch.float32) == ()
        assert model.norm is before


@pytest.mark.parametrize("kind", NORMS)
def test_no_norm_without_a_gate_takes_the_place_of_one_with(kind: str) -> None:
    """With one group, without its gate it computes what a plain RMS norm does."""
    model = model_of(NORMS[kind]())
    x, gate = torch.randn(2, 1, 5, 96, device=DEVICE)
    expected = model.norm(x, gate)
    with torch.no_grad():
        assert rms_norm.apply(model, target_of("cpu", "float32")) == ()
    torch.testing.assert_close(model.norm(x, gate), expected)
