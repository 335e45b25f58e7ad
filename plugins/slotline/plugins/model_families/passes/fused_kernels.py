"""Launches of the Triton kernels. Implements `kernels.FusedKernels` for any floating dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch.nn import functional

from slotline.plugins.model_families.passes import triton_kernels
from slotline.plugins.model_families.passes.kernels import NormWeight

ACTIVATION_BLOCK = 1024
ROWS_BY_HEAD, MANY_HEADS = 64, 8
"""Up to so many rows a program turns one head, to use many multiprocessors; above, several, to need fewer programs."""
PRODUCT_ROWS = 2
"""Up to so many rows our product fetches a weight faster than torch's library, which is made for more."""


class ProductShape(NamedTuple):
    """Outputs of a program of the product, how many elements it reads of each at a time, and its warps."""

    outputs: int
    elements: int
    warps: int


PRODUCT = ProductShape(2, 1024, 4)
"""The fastest of twelve on an H200 for the products of a layer of 1,024 elements."""


class TritonKernels:
    """Row kernels on a GPU; capturable, and compiled at their first call for each dtype and width."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """See `kernels.RowKernels.rms_norm`."""
        x = x.contiguous()
        out = torch.empty_like(x)
        n = weight.numel()
        triton_kernels.rms_norm[(x.numel() // n,)](x, weight, out, eps, offset, n=n, **_row_options(n))
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, inner: NormWeight | None, outer: NormWeight | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.FusedKernels.add_rms_norm`."""
        n = x.shape[-1]
        total = torch.empty_like(residual)
        out = total if outer is None else torch.empty_like(residual)
        triton_kernels.add_rms_norm[(x.numel() // n,)](
            x,
            residual,
            x if inner is None else inner.weight,
            x if outer is None else outer.weight,
            total,
            out,
            0.0 if inner is None else inner.eps,
            0.0 if inner is None else inner.offset,
            0.0 if outer is None else outer.eps,
            0.0 if outer is None else outer.offset,
            n=n,
            has_inner=inner is not None,
            has_outer=outer is not None,
            **_row_options(n),
        )
        return total, out

    def rotate(self, states: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> None:
        """See `kernels.RowKernels.rotate`."""
        self._rotate(states, None, None, heads, heads, cos, sin, rotary_size)

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
        """See `kernels.FusedKernels.norm_and_rotate`."""
        self._rotate(states, query, key, query_heads, query_heads + key_heads, cos, sin, rotary_size)

    def _rotate(
        self,
        states: torch.Tensor,
        query: NormWeight | None,
        key: NormWeight | None,
        query_heads: int,
        heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rotary_size: int,
    ) -> None:
        _, _, held, size = states.shape
        width = cos.shape[-1]
        rows = cos.numel() // width
        block_heads = 1 if rows <= ROWS_BY_HEAD else min(MANY_HEADS, triton.next_power_of_2(heads))
        triton_kernels.rotate[(rows, triton.cdiv(heads, block_heads))](
            states,
            cos,
            sin,
            cos if query is None else query.weight,
            cos if key is None else key.weight,
            0.0 if query is None else query.eps,
            0.0 if query is None else query.offset,
            held * size,
            query_heads=query_heads,
            heads=heads,
            size=size,
            rotary_size=rotary_size,
            cos_size=width,
            block_heads=block_heads,
            padded_half=triton.next_power_of_2(rotary_size // 2),
            padded_rest=triton.next_power_of_2(max(1, size - rotary_size)),
            has_norms=query is not None,
            num_warps=1 if block_heads == 1 else 4,
        )

    def act_and_mul(self, merged: torch.Tensor, activation: str) -> torch.Tensor:
        """See `kernels.FusedKernels.act_and_mul`."""
        n = merged.shape[-1] // 2
        out = merged.new_empty((*merged.shape[:-1], n))
        block = min(ACTIVATION_BLOCK, triton.next_power_of_2(n))
        grid = (out.numel() // n, triton.cdiv(n, block))
        triton_kernels.act_and_mul[grid](merged, out, n, activation=activation, block=block)
        return out

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `kernels.FusedKernels.linear`."""
        n, k = weight.shape
        if x.numel() > PRODUCT_ROWS * k:
            return functional.linear(x, weight, bias)
        out = x.new_empty((*x.shape[:-1], n))
        _product(x.contiguous(), weight, bias, None, out)
        return out

    def add_linear(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `kernels.FusedKernels.add_linear`."""
        n, k = weight.shape
        if x.numel() <= PRODUCT_ROWS * k:
            _product(x.contiguous(), weight, bias, residual, residual)
            return residual
        residual.view(-1, n).addmm_(x.reshape(-1, k), weight.t())
        return residual if bias is None else residual.add_(bias)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    (n, k), (outputs, elements, warps) = weight.shape, PRODUCT
    rows = x.numel() // k
    triton_kernels.linear[(rows * triton.cdiv(n, outputs),)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        rows,
        n,
        k=k,
        block_n=outputs,
        block_k=min(elements, triton.next_power_of_2(k)),
        has_bias=bias is not None,
        has_residual=residual is not None,
        num_warps=warps,
    )


def _row_options(n: int) -> dict[str, int]:
    padded = triton.next_power_of_2(n)
    return {"padded": padded, "num_warps": min(16, max(1, padded // 256))}
