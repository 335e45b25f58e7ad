"""Interfaces of a device's kernels for the passes, with tensors. `cpu_kernels` and `fused_kernels` implement them."""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import frozen

from slotline.registry.contracts.attention import CacheSlots


@frozen(eq=False)
class NormWeight:
    """Weight, epsilon and offset of an RMS norm over n elements.

    Attributes:
        weight: [n].
        eps: added to the mean square.
        offset: added to the weight.
    """

    weight: torch.Tensor
    eps: float
    offset: float


@frozen
class GatedNorm:
    """RMS norm with a gate: their order, and the size of the normed groups.

    Attributes:
        eps: added to the mean square.
        group_size: elements that are normed together. A row has one or more groups.
        gate_first: True for ``norm(x * silu(gate)) * weight``, False for ``norm(x) * weight * silu(gate)``.
    """

    eps: float
    group_size: int
    gate_first: bool


@frozen(eq=False)
class LayerWeights:
    """Weights between two attentions. All are contiguous.

    Attributes:
        o: [hidden, attended].
        norm: between the output projection and the MLP.
        gate_up: [2 * inner, hidden], gate first.
        down: [hidden, inner].
        next_norm: of the next layer.
        qkv: [outputs, hidden], the next layer's.
        bias: of qkv, or None.
        activation: of `kernels.ACTIVATIONS`.
    """

    o: torch.Tensor
    norm: NormWeight
    gate_up: torch.Tensor
    down: torch.Tensor
    next_norm: NormWeight
    qkv: torch.Tensor
    bias: torch.Tensor | None
    activation: str


class RowKernels(Protocol):
    """Kernels over the rows of one dtype. They compute in float32 and round once, without checks."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """Return ``x / rms(x) * (offset + weight)``: x [..., n] and weight [n] to [..., n] contiguous."""
        ...

    def rotate(self, states: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> None:
        """Apply rotary embedding to the first `heads` heads, in place.

        Args:
            states: [batch, num_tokens, >= heads, head_size] contiguous.
            heads: number of heads to rotate.
            cos, sin: [batch, num_tokens, rotary_size or half of it] contiguous.
            rotary_size: elements of a head to rotate. Halves, not neighbours, form the pairs.
        """
        ...


class FusedKernels(RowKernels, Protocol):
    """Kernels of a device on which a launch costs more than a row, so that neighbouring operations share one."""

    def angles(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, width: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of each position times each frequency, times `scaling`.

        positions are [batch, num_tokens] integers, frequencies [n] float32. The results are two [batch, num_tokens,
        width], with width n, or 2 * n with every angle twice.
        """
        ...

    def rotate_and_store(
        self,
        states: torch.Tensor,
        query: NormWeight | None,
        key: NormWeight | None,
        query_heads: int,
        key_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rotary_size: int,
        slots: CacheSlots | None = None,
    ) -> None:
        """Apply an RMS norm to each query and key head over its head_size elements, then `rotate` both, in place.

        `states` contain the query heads first, then the key heads, then the same number of value heads. `query` and
        `key` are both None or have the same eps and offset. With `slots`, one per token, keys and values are also
        stored there.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, inner: NormWeight | None, outer: NormWeight | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``total = residual + norm(x)`` by `inner` and the norm of the rounded total by `outer`.

        None is no norm.

        The residual is [..., n] contiguous. x is the same, or parts [parts, ..., n] that are summed. The rows of x may
        be parts of wider rows. Both results are [..., n]. Without `outer` the total is returned twice.
        """
        ...

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, form: GatedNorm
    ) -> torch.Tensor:
        """Apply `GatedNorm` to x and gate [..., n] and weight [n]. The result is [..., n] contiguous, of x's dtype."""
        ...

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: NormWeight | None = None
    ) -> torch.Tensor:
        """Return ``norm(x) @ weight.T + bias``: x [..., in_features], weight [out_features, in_features] contiguous."""
        ...

    def linear_parts(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return `linear` as parts [parts, ..., out_features] whose sum it is, for `add_rms_norm`."""
        ...

    def extended_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int
    ) -> torch.Tensor | None:
        """Return `linear_parts` for a weight that had `out_features` rows before it was extended.

        None if a product in parts is not faster than a whole one.
        """
        ...

    def project(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T`` in float32 for a wide weight: x [..., in_features], weight [outputs, in_features]."""
        ...

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        norm: NormWeight | None = None,
    ) -> torch.Tensor:
        """Return ``activation(gate) * up`` of the halves of `linear`'s output, gate first: [..., out_features / 2].

        `activation` is one of `ACTIVATIONS`.
        """
        ...

    def act_and_mul(self, merged: torch.Tensor, activation: str) -> torch.Tensor:
        """Return ``activation(gate) * up`` [..., n] of merged [..., 2 * n], gate first. Its rows may have gaps."""
        ...

    def add_linear(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `linear` plus a contiguous residual [..., out_features], which may be overwritten by the result."""
        ...

    def joins_rows(self, rows: int) -> bool:
        """Return True if `between` is faster than separate kernels for so many rows."""
        ...

    def joins(self, weights: LayerWeights) -> bool:
        """Return True if `between` takes these weights, and is faster than separate kernels for them."""
        ...

    def between(
        self, attended: torch.Tensor, residual: torch.Tensor, weights: LayerWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute all from the output of one attention to the input of the next, where `joins` and `joins_rows`.

        attended [..., heads * size] and the layer's input [..., hidden_size] become the layer's output [...,
        hidden_size] and the next layer's merged projection [..., outputs].
        """
        ...

    def norms_inside(self, x: torch.Tensor) -> bool:
        """Return True if products of inputs like x [..., in_features] norm them, and add residuals, at no extra cost.

        `add_linear` does not change the residual then.
        """
        ...


ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
"""What `FusedKernels.gated_linear` knows."""
