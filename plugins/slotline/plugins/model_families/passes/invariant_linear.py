"""Linear layers whose output for a row is bitwise the same in any batch.

A matrix library chooses its kernel, and so the order of its sums, by the number of rows. Here that number is always the
same. On a CPU rows are multiplied in tiles of `TILE`, the last one padded with zeros. On a GPU one Triton kernel of
fixed sizes handles any number. Rows of a product are independent. After He et al. 2025, Defeating Nondeterminism in LLM
Inference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from slotline.plugins.model_families.passes.packed_linear import PackedLinear
from slotline.plugins.model_families.passes.target import Target, slots
from slotline.registry.errors import ModelError

TILE = 16
"""Rows of a product on a CPU."""
SAFE = (nn.Embedding,)
"""Modules with a weight of two dimensions whose rows do not meet."""


class TiledLinear(nn.Module):
    """A linear layer on a CPU that multiplies `TILE` rows at a time.

    Attributes:
        in_features, out_features: sizes.
    """

    def __init__(self, linear: nn.Linear, target: Target) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = PackedLinear(linear.weight, linear.bias) if target.packs else linear

    @property
    def weight(self) -> torch.Tensor:
        """Weight [out_features, in_features], a copy if it is packed."""
        return self.product.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % TILE))
        parts = [self.product(part.contiguous()) for part in padded.split(TILE)]
        out = torch.cat(parts)[: len(rows)] if parts else x.new_empty(0, self.out_features)
        return out.view(*x.shape[:-1], self.out_features)


class KernelLinear(nn.Module):
    """A linear layer on a GPU by one kernel of fixed sizes.

    Attributes:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from slotline.plugins.model_families.passes.invariant_kernels import linear as kernel

        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._kernel: Callable[..., torch.Tensor] = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return self._kernel(x, self.weight, self.bias)


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Replace every linear layer.

    Raises:
        ModelError: if other modules multiply weights, or the device has no such kernel.
    """
    if target.device == "cuda" and target.kernels is None:
        raise ModelError(
            "batch_invariant: this GPU has no kernels of fixed sizes",
            fix="install Triton, on a GPU of compute capability 8.0 or later, or set batch_invariant = false",
        )
    count = 0
    for parent, name, child in slots(model):
        if type(child) is nn.Linear:
            setattr(parent, name, TiledLinear(child, target) if target.device == "cpu" else KernelLinear(child))
            count += 1
    others = sorted({type(m).__name__ for m in model.modules() if _multiplies(m)})
    if others:
        raise ModelError(
            f"batch_invariant: {', '.join(others)} multiply weights in a way that hangs on the number of rows",
            fix="set batch_invariant = false for this model",
        )
    sizes = f"in tiles of {TILE} rows" if target.device == "cpu" else "by a kernel of fixed sizes"
    return (f"{count} linear layers {sizes}: batch-invariant",)


def _multiplies(module: nn.Module) -> bool:
    """Return True if a module has a weight of its own that this pass does not know."""
    if isinstance(module, (*SAFE, PackedLinear, KernelLinear, nn.Linear)):
        return False
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
