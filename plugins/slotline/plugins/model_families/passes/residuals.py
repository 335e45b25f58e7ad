"""Two ways of adding an output projection's result to a layer's residual without a separate operation.

On a CPU the sum is the product's last step. On a GPU that would copy a residual that others still read, so the sum is
the first step of the following norm. If the residual is the layer's own, the product adds to it in place.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from slotline.plugins.model_families.passes.extended_linear import ExtendedLinear
from slotline.plugins.model_families.passes.kernels import FusedKernels
from slotline.plugins.model_families.passes.packed_linear import PackedLinear, has_hooks
from slotline.plugins.model_families.passes.rms_norm import KernelRMSNorm
from slotline.plugins.model_families.passes.target import Target

ROWS_BEHIND = 1024
"""Up to so many rows a launch of its own for a norm takes longer than reading a residual once more."""


class Residuals(Protocol):
    """A target's way of adding to residuals. A linear layer with hooks is called as a module.

    Attributes:
        linear: the exact type of linear layer that it computes without calling the module.
        norms_branches: True if it can norm the summand first.
    """

    linear: type[nn.Module]
    norms_branches: bool

    def add_and_norm(
        self, linear: Any, x: torch.Tensor, residual: torch.Tensor, inner: Any, outer: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``total = residual + inner(linear(x))`` and ``outer(total)``. A norm may be None.

        x is [batch, num_tokens, in_features], the others are [batch, num_tokens, out_features]. The residual is not
        changed.
        """
        ...

    def add(self, linear: Any, x: torch.Tensor, residual: torch.Tensor, inner: Any) -> torch.Tensor:
        """Return ``residual + inner(linear(x))``. The residual may be overwritten, unless `keeps` returns True."""
        ...

    def keeps(self, hidden_states: torch.Tensor) -> bool:
        """Return True if, for few tokens, products norm their own input and `add` does not change the residual."""
        ...

    def norms_behind(self, hidden_states: torch.Tensor) -> bool:
        """Return True if, for this number of tokens, `add_and_norm` costs less than `add` and a separate norm."""
        ...

    def overwrites(self, hidden_states: torch.Tensor) -> bool:
        """Return True if, for this many tokens, `add` in place and a separate norm cost less than `add_and_norm`."""
        ...


class PackedResiduals:
    """Implements `Residuals` with packed linear layers."""

    linear: type[nn.Module] = PackedLinear
    norms_branches = False

    def add_and_norm(
        self, linear: PackedLinear, x: torch.Tensor, residual: torch.Tensor, inner: None, outer: KernelRMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Residuals.add_and_norm`."""
        total = self.add(linear, x, residual, None)
        return total, outer.forward(total)

    def add(self, linear: PackedLinear, x: torch.Tensor, residual: torch.Tensor, inner: None) -> torch.Tensor:
        """See `Residuals.add`."""
        return residual + linear(x) if has_hooks(linear) else linear.plus(x, residual)

    def keeps(self, hidden_states: torch.Tensor) -> bool:
        """See `Residuals.keeps`: oneDNN's products do not norm."""
        return False

    def norms_behind(self, hidden_states: torch.Tensor) -> bool:
        """See `Residuals.norms_behind`: it is the same here."""
        return False

    def overwrites(self, hidden_states: torch.Tensor) -> bool:
        """See `Residuals.overwrites`: it is the same here."""
        return False


class FusedResiduals:
    """Implements `Residuals` with torch's linear layers and the device's fused kernels."""

    linear: type[nn.Module] = nn.Linear
    norms_branches = True

    def __init__(self, kernels: FusedKernels) -> None:
        self._kernels = kernels

    def add_and_norm(
        self,
        linear: nn.Linear,
        x: torch.Tensor,
        residual: torch.Tensor,
        inner: KernelRMSNorm | None,
        outer: KernelRMSNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Residuals.add_and_norm`."""
        first = None if inner is None else inner.factors
        second = None if outer is None else outer.factors
        forward = linear.__dict__.get("forward")
        if type(forward) is ExtendedLinear:
            branch = forward.parts(x, self._kernels.extended_parts)
        elif has_hooks(linear):
            branch = linear(x)[None]
        else:
            branch = self._kernels.linear_parts(x, linear.weight, linear.bias)
        return self._kernels.add_rms_norm(branch, residual.contiguous(), first, second)

    def add(
        self, linear: nn.Linear, x: torch.Tensor, residual: torch.Tensor, inner: KernelRMSNorm | None
    ) -> torch.Tensor:
        """See `Residuals.add`."""
        if inner is not None or has_hooks(linear):
            return self.add_and_norm(linear, x, residual, inner, None)[0]
        return self._kernels.add_linear(residual, x, linear.weight, linear.bias)

    def keeps(self, hidden_states: torch.Tensor) -> bool:
        """See `Residuals.keeps`."""
        return self._kernels.norms_inside(hidden_states)

    def norms_behind(self, hidden_states: torch.Tensor) -> bool:
        """See `Residuals.norms_behind`: the library's product adds a residual while it writes, but has no norm."""
        return not self.keeps(hidden_states) and hidden_states.numel() <= ROWS_BEHIND * hidden_states.shape[-1]

    def overwrites(self, hidden_states: torch.Tensor) -> bool:
        """See `Residuals.overwrites`."""
        many = hidden_states.numel() > ROWS_BEHIND * hidden_states.shape[-1]
        return many and hidden_states.is_contiguous()


def residuals_of(target: Target) -> Residuals | None:
    """Return the target's way of adding to residuals, or None."""
    if target.packs:
        return PackedResiduals()
    return None if target.fused is None else FusedResiduals(target.fused)
