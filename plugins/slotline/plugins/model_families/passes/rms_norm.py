"""RMS norms in one call instead of six operations.

They are found by their shape, a weight [n] and an epsilon, and accepted only if they give the original's output.
Gemma's norms multiply by one plus the weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional

from slotline.plugins.model_families.passes.equality import equal
from slotline.plugins.model_families.passes.gated_norm import takes_gate
from slotline.plugins.model_families.passes.kernels import NormWeight, RowKernels
from slotline.plugins.model_families.passes.packed_linear import has_hooks
from slotline.plugins.model_families.passes.target import Target, slots

EPSILON_NAMES = ("variance_epsilon", "eps")
OFFSETS = (0.0, 1.0)
"""What is added to the weight: nothing, or Gemma's one."""


class TorchRMSNorm(nn.Module):
    """``x / rms(x) * (offset + weight)`` over the last dimension by torch's operation, in float32 inside.

    Attributes:
        weight: [n], as in the checkpoint.
        eps: added to the mean square.
        offset: added to the weight.
    """

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps, self.offset = eps, offset
        self._shape = list(weight.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., n] to [..., n]."""
        if self.offset == 0.0:
            return functional.rms_norm(x, self._shape, self.weight, self.eps)
        return functional.rms_norm(x.float(), self._shape, self.offset + self.weight.float(), self.eps).to(x.dtype)


class KernelRMSNorm(TorchRMSNorm):
    """The same by the device's kernel."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float, kernels: RowKernels) -> None:
        super().__init__(weight, eps, offset)
        self._kernel = kernels.rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., n] to [..., n] contiguous."""
        weight = self._parameters["weight"]
        if x.dtype != weight.dtype:  # type: ignore[union-attr]
            return super().forward(x)
        return self._kernel(x, weight, self.eps, self.offset)  # type: ignore[arg-type]

    @property
    def factors(self) -> NormWeight:
        """The norm as the kernels take it."""
        return NormWeight(self._parameters["weight"], self.eps, self.offset)  # type: ignore[arg-type]


def is_kernel_norm(module: nn.Module | None) -> TypeGuard[KernelRMSNorm]:
    """Return True if a module is a norm by the kernel that may be computed without calling it."""
    return type(module) is KernelRMSNorm and not module._forward_hooks and not module._forward_pre_hooks


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Replace every norm for which a lean one is equal."""
    make: Callable[..., TorchRMSNorm] = TorchRMSNorm
    if target.kernels is not None:
        make = partial(KernelRMSNorm, kernels=target.kernels)
    replaced: Counter[str] = Counter()
    for parent, name, child in slots(model):
        lean = _lean_norm(child, make, target)
        if lean is not None:
            setattr(parent, name, lean)
            kind = type(lean).__name__
            replaced[f"{kind}, weight + {lean.offset:g}" if lean.offset else kind] += 1
    return tuple(f"{count} RMS norms in one call ({what})" for what, count in sorted(replaced.items()))


def _lean_norm(module: nn.Module, make: Callable[..., TorchRMSNorm], target: Target) -> TorchRMSNorm | None:
    eps = next((getattr(module, name) for name in EPSILON_NAMES if hasattr(module, name)), None)
    weight = module._parameters.get("weight")
    if not isinstance(eps, float) or weight is None or weight.dim() != 1 or has_hooks(module):
        return None
    if takes_gate(module):
        return None  # without a gate it may be equal, and with one it is called
    # The probe must see a weight unlike one and zero, where the variants agree.
    probe = nn.Parameter(torch.linspace(0.1, 0.7, weight.numel()).to(weight), requires_grad=False)
    for offset in OFFSETS:
        if target.decisions.decide(partial(_equal_with, module, make(probe, eps, offset), probe)):
            return make(weight, eps, offset)
    return None


def _equal_with(module: nn.Module, lean: nn.Module, probe: nn.Parameter) -> bool:
    weight = module._parameters["weight"]
    module._parameters["weight"] = probe
    try:
        return equal(module, lean, probe.numel(), probe)
    except (RuntimeError, TypeError, ValueError):
        return False  # the original is no function of one tensor
    finally:
        module._parameters["weight"] = weight
