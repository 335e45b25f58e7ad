"""Two decoder layers in a row that one kernel joins: it computes what is between their attentions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from slotline.plugins.model_families.passes.equality import TOLERANCES, relative_difference
from slotline.plugins.model_families.passes.kernels import FusedKernels, LayerWeights
from slotline.plugins.model_families.passes.lean_mlp import LeanMLP
from slotline.plugins.model_families.passes.packed_linear import has_hooks
from slotline.plugins.model_families.passes.rms_norm import is_kernel_norm

PROBE_ROWS = (3, 8)


class Projected(NamedTuple):
    """The merged projection of a layer's normed input, [batch, num_tokens, all heads * size]."""

    qkv: torch.Tensor


class LayerLink:
    """What follows the attention of a layer, up to the attention of the next.

    Args:
        layer: with one norm before attention and one before the MLP, and both short forwards.
        behind: the next layer, the same.
        fused: the device's kernels.
    """

    def __init__(self, layer: nn.Module, behind: nn.Module, fused: FusedKernels) -> None:
        self._layer: Any = layer
        self._behind: Any = behind
        self._fused = fused

    @property
    def norm(self) -> nn.Module | None:
        """The norm that the next layer begins with."""
        return self._behind._modules["input_layernorm"]  # type: ignore[no-any-return]

    def __call__(self, mixed: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, Projected] | None:
        """Return the layer's output and the next layer's projection. None if other kernels are faster or must be used.

        Args:
            mixed: the output of attention [batch, num_tokens, heads * size].
            residual: the layer's input [batch, num_tokens, hidden_size].
        """
        rows = residual.numel() // residual.shape[-1]
        if not self._fused.joins_rows(rows):
            return None
        weights = self.weights()
        if weights is None or not self._fused.joins(weights):
            return None
        out, qkv = self._fused.between(mixed, residual, weights)
        return out, Projected(qkv)

    def weights(self) -> LayerWeights | None:
        """Return the weights, None if a module between the two attentions must be called."""
        layer, behind = self._layer._modules, self._behind._modules
        o, mlp, norm, next_norm = (
            layer["self_attn"]._modules["o_proj"],
            layer["mlp"],
            layer["post_attention_layernorm"],
            behind["input_layernorm"],
        )
        down, lean = mlp._modules["down_proj"], mlp.__dict__.get("forward")
        if type(lean) is not LeanMLP or not (is_kernel_norm(norm) and is_kernel_norm(next_norm)):
            return None
        gate_up, qkv = lean.projection(), behind["self_attn"].forward.projection()
        if gate_up is None or qkv is None or any(type(x) is not nn.Linear or has_hooks(x) for x in (o, down)):
            return None
        if self._behind._forward_pre_hooks or any(linear.bias is not None for linear in (o, gate_up, down)):
            return None
        return LayerWeights(
            o.weight,
            norm.factors,
            gate_up.weight,
            down.weight,
            next_norm.factors,
            qkv.weight,
            qkv.bias,
            lean.activation,
        )

    def is_equal(self) -> bool:
        """Return True if the one kernel gives what the others do, for few and for more rows."""
        weights = self.weights()
        if weights is None or not self._fused.joins(weights):
            return False
        return all(self._is_equal(weights, rows) for rows in PROBE_ROWS)

    def _is_equal(self, weights: LayerWeights, rows: int) -> bool:
        generator = torch.Generator().manual_seed(rows)
        mixed, residual = (
            torch.randn(1, rows, size, generator=generator).to(weights.o) for size in reversed(weights.o.shape)
        )
        found = self._fused.between(mixed, residual, weights)
        expected = separate(self._fused, mixed, residual, weights)
        tolerance = TOLERANCES[residual.dtype]
        return all(relative_difference(a, b) <= tolerance for a, b in zip(found, expected, strict=True))


def separate(
    fused: FusedKernels, mixed: torch.Tensor, residual: torch.Tensor, weights: LayerWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `FusedKernels.between` does by separate kernels."""
    parts = fused.linear_parts(mixed, weights.o, None)
    middle, normed = fused.add_rms_norm(parts, residual, None, weights.norm)
    gated = fused.gated_linear(normed, weights.gate_up, None, weights.activation)
    out, normed = fused.add_rms_norm(fused.linear_parts(gated, weights.down, None), middle, None, weights.next_norm)
    return out, fused.linear(normed, weights.qkv, weights.bias)


def is_plain(norms: tuple[str | None, ...]) -> bool:
    """Return True for the names of norms that a link knows."""
    return norms == ("input_layernorm", None, "post_attention_layernorm", None)
