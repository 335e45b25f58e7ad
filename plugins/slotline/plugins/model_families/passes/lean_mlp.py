"""Gated MLPs with a short forward: gate and up in one matrix product, activation and product in one kernel.

The module and its children stay. A module whose projections were replaced uses its original forward. The short forward
is installed only after it has given the original's output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from slotline.plugins.model_families.passes.equality import TOLERANCES, equal, relative_difference
from slotline.plugins.model_families.passes.kernels import ACTIVATIONS, FusedKernels
from slotline.plugins.model_families.passes.merged_projections import GATE_UP, PlainMerged, merged_of
from slotline.plugins.model_families.passes.packed_linear import has_hooks
from slotline.plugins.model_families.passes.rms_norm import KernelRMSNorm
from slotline.plugins.model_families.passes.target import Target


class LeanMLP:
    """The short forward of one gated MLP.

    Args:
        module: the MLP, with merged `gate_proj` and `up_proj` or with a `gate_up_proj`, and a `down_proj`.
        fused: the device's kernels.
        activation: of `kernels.ACTIVATIONS`.

    Attributes:
        activation: as given.
    """

    def __init__(self, module: nn.Module, fused: FusedKernels, activation: str) -> None:
        self._module: Any = module
        self._original: Callable[..., Any] = module.forward
        self._fused, self.activation = fused, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., hidden_size] to [..., hidden_size]."""
        gated = self.gated(x)
        return self._original(x) if gated is None else self._module.down_proj(gated)  # type: ignore[no-any-return]

    def projection(self) -> nn.Linear | PlainMerged | None:
        """Return the merged gate and up if another kernel may compute it."""
        merged = merged_of(self._module, "gate_up_proj", GATE_UP)
        return merged if type(merged) in (nn.Linear, PlainMerged) and not has_hooks(merged) else None  # type: ignore

    def gated(self, x: torch.Tensor, norm: KernelRMSNorm | None = None) -> torch.Tensor | None:
        """Return the input of the down projection for x or its norm, [..., intermediate_size].

        None if the original must be called.
        """
        merged: Any = merged_of(self._module, "gate_up_proj", GATE_UP)
        if merged is None:
            return None
        if has_hooks(merged):
            return self._fused.act_and_mul(merged(x if norm is None else norm.forward(x)), self.activation)
        factors = None if norm is None else norm.factors
        return self._fused.gated_linear(x, merged.weight, merged.bias, self.activation, factors)


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Shorten the forward of every gated MLP for which the short one is equal."""
    if target.fused is None:
        return ()
    count = 0
    for module in list(model.modules()):
        lean = _lean_mlp(module, target, target.fused)
        if lean is not None:
            module.forward = lean
            count += 1
    return (f"merged gate and up with one activation kernel in {count} gated MLPs",) if count else ()


def _lean_mlp(module: nn.Module, target: Target, fused: FusedKernels) -> LeanMLP | None:
    merged, down = merged_of(module, "gate_up_proj", GATE_UP), module._modules.get("down_proj")
    if merged is None or type(down) is not nn.Linear or down.weight.dtype != target.dtype or has_hooks(module):
        return None
    activation = target.decisions.decide(partial(_activation, module, fused, down.weight.device))
    if activation is None:
        return None
    lean = LeanMLP(module, fused, activation)
    features = merged.weight.shape[-1]  # type: ignore[attr-defined]
    same = target.decisions.decide(partial(equal, lean._original, lean, features, down.weight))
    return lean if same else None


def _activation(module: nn.Module, fused: FusedKernels, device: torch.device) -> str | None:
    """Return the MLP's activation by our name. The test uses float32, since bfloat16 hides the kind of GELU."""
    function = module._modules.get("act_fn", module._modules.get("activation_fn"))
    if function is None:
        return None
    x = torch.linspace(-6.0, 6.0, 193, device=device)
    weight, expected = torch.cat([x, torch.ones_like(x)])[:, None], function(x)  # the product with one is [x, 1]
    one = torch.ones(1, 1, device=device)
    for name in ACTIVATIONS:
        if relative_difference(fused.gated_linear(one, weight, None, name), expected) <= TOLERANCES[torch.float32]:
            return name
    return None
