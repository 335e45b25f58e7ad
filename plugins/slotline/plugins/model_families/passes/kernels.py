"""What the passes ask of a device's kernels, in tensors; `cpu_kernels` and `fused_kernels` are the two answers."""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import frozen


@frozen(eq=False)
class NormWeight:
    """What an RMS norm over n elements multiplies by and adds.

    Attributes:
        weight: [n].
        eps: added to the mean square.
        offset: added to the weight.
    """

    weight: torch.Tensor
    eps: float
    offset: float


class RowKernels(Protocol):
    """Kernels over the rows of one dtype; they compute in float32 and round once. Nothing is checked inside."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """``x / rms(x) * (offset + weight)``: x [..., n] and weight [n] to [..., n] contiguous."""
        ...

    def rotate(self, states: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> None:
        """Rotary embedding of the first `heads` heads, in place.

        Args:
            states: [batch, num_tokens, >= heads, head_size] contiguous.
            heads: how many of them turn.
            cos, sin: [batch, num_tokens, rotary_size or half of it] contiguous.
            rotary_size: elements of a head that turn; halves, not neighbours, form the pairs.
        """
        ...


class FusedKernels(RowKernels, Protocol):
    """Kernels of a device on which a launch costs more than a row, so that neighbouring operations share one."""

    def norm_and_rotate(
        self,
        states: torch.Tensor,
        query: NormWeight,
        key: NormWeight,
        query_heads: int,
        key_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rotary_size: int,
    ) -> None:
        """An RMS norm of each query and key head over its head_size elements, then `rotate` of both, in place.

        `states` hold the query heads first, then the key heads; `query` and `key` have the same eps and offset.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, inner: NormWeight | None, outer: NormWeight | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``total = residual + norm(x)`` by `inner` and the norm of the rounded total by `outer`; None is no norm.

        x and residual are [..., n] contiguous. Returns both, [..., n]; without `outer` the total twice.
        """
        ...

    def act_and_mul(self, merged: torch.Tensor, activation: str) -> torch.Tensor:
        """``activation(gate) * up`` of merged [..., 2 * n] contiguous, gate first, to [..., n].

        `activation` is one of `ACTIVATIONS`.
        """
        ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``: x [..., in_features], weight [out_features, in_features] contiguous."""
        ...

    def add_linear(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`linear` added in place to a contiguous residual [..., out_features], which is returned."""
        ...


ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
"""What `FusedKernels.act_and_mul` knows."""
