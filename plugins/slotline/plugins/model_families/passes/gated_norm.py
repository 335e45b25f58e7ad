"""Gated RMS norms in one call instead of ten operations, after the scan of Mamba-2 and the gated delta rule.

They are found by a forward that takes a gate, a weight and an epsilon. The families differ in the order of gate and
norm, and in the number of groups of a row that are normed separately. A form is used only if it gives the original's
output.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from slotline.plugins.model_families.passes.equality import TOLERANCES, relative_difference
from slotline.plugins.model_families.passes.kernels import FusedKernels, GatedNorm
from slotline.plugins.model_families.passes.packed_linear import has_hooks
from slotline.plugins.model_families.passes.target import Target, slots

EPSILON_NAMES = ("variance_epsilon", "eps")
GROUP_COUNTS = ("n_groups", "num_groups")


class FusedGatedNorm(nn.Module):
    """The norm of a gated row, or the gated norm of a row, in the device's kernel.

    Attributes:
        weight: [n], as in the checkpoint.
    """

    def __init__(self, weight: nn.Parameter, form: GatedNorm, kernels: FusedKernels) -> None:
        super().__init__()
        self.weight = weight
        self._form, self._kernel = form, kernels.gated_rms_norm

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Map [..., n] twice to [..., n] contiguous."""
        return self._kernel(hidden_states, gate, self._parameters["weight"], self._form)  # type: ignore[arg-type]


def takes_gate(module: nn.Module) -> bool:
    """Return True if a module's forward takes a gate."""
    return "gate" in inspect.signature(module.forward).parameters


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Replace every gated norm for which the kernel is equal."""
    if target.fused is None:
        return ()
    count = 0
    for parent, name, child in slots(model):
        if takes_gate(child) and not has_hooks(child):
            fused = _fused(child, target, target.fused)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
    return (f"{count} gated RMS norms in one call",) if count else ()


def _fused(module: nn.Module, target: Target, kernels: FusedKernels) -> FusedGatedNorm | None:
    eps = next((getattr(module, name) for name in EPSILON_NAMES if hasattr(module, name)), None)
    weight = module._parameters.get("weight")
    if not isinstance(eps, float) or weight is None or weight.dim() != 1:
        return None
    probe = nn.Parameter(torch.linspace(0.1, 0.7, weight.numel()).to(weight), requires_grad=False)
    for form in _forms(module, weight.numel(), eps):
        if target.decisions.decide(partial(_equal_with, module, FusedGatedNorm(probe, form, kernels), probe)):
            return FusedGatedNorm(weight, form, kernels)
    return None


def _forms(module: nn.Module, n: int, eps: float) -> Iterator[GatedNorm]:
    sizes = {n, getattr(module, "group_size", n)}
    sizes |= {n // getattr(module, name) for name in GROUP_COUNTS if getattr(module, name, 0)}
    for size in sorted(sizes):
        for gate_first in (True, False):
            yield GatedNorm(eps=eps, group_size=size, gate_first=gate_first)


def _equal_with(module: nn.Module, fused: FusedGatedNorm, probe: nn.Parameter) -> bool:
    generator = torch.Generator().manual_seed(probe.numel())
    x, gate = (torch.randn(1, 3, probe.numel(), generator=generator).to(probe) for _ in range(2))
    weight = module._parameters["weight"]
    module._parameters["weight"] = probe
    try:
        with torch.no_grad():
            expected, found = module(x, gate), fused(x, gate)
    except (RuntimeError, TypeError, ValueError):
        return False  # the original is no function of two tensors
    finally:
        module._parameters["weight"] = weight
    same = found.shape == expected.shape and found.dtype == expected.dtype
    return same and relative_difference(found, expected) <= TOLERANCES[probe.dtype]
