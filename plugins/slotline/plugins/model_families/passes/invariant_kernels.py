"""A matrix product in Triton whose sums have the same order for any number of rows."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64


@triton.jit
def _linear(
    x,
    weight,
    bias,
    out,
    rows,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    has_bias: tl.constexpr,
    exact: tl.constexpr,
):
    """Multiply x [rows, k] by weight [n, k] transposed. Grid: (blocks of n, blocks of rows)."""
    row = tl.program_id(1) * block_m + tl.arange(0, block_m)
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    at = tl.arange(0, block_k)
    x_at = x + row[:, None].to(tl.int64) * k + at[None, :]
    weight_at = weight + column[None, :].to(tl.int64) * k + at[:, None]
    total = tl.zeros([block_m, block_n], tl.float32)
    for start in range(0, k, block_k):
        inside = start + at < k
        left = tl.load(x_at + start, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        right = tl.load(weight_at + start, mask=(column < n)[None, :] & inside[:, None], other=0.0)
        if exact:
            total += tl.dot(left, right, input_precision="ieee")
        else:
            total = tl.dot(left, right, total)
    if has_bias:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < n)[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply [..., k] by weight [n, k] transposed and add bias [n]: [..., n], summed in float32 without TF32."""
    n, k = weight.shape
    rows = x.reshape(-1, k).contiguous()
    out = torch.empty(len(rows), n, dtype=x.dtype, device=x.device)
    exact = x.dtype == torch.float32
    _linear[(triton.cdiv(n, BLOCK_N), triton.cdiv(len(rows), BLOCK_M))](
        rows,
        weight,
        rows if bias is None else bias,
        out,
        len(rows),
        n,
        k,
        block_m=BLOCK_M,
        block_n=BLOCK_N,
        block_k=32 if exact else BLOCK_K,
        has_bias=bias is not None,
        exact=exact,
        num_warps=4,
        num_stages=3 if exact else 4,
    )
    return out.view(*x.shape[:-1], n)
