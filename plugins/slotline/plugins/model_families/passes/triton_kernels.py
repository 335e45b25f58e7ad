"""Triton kernels over rows: norms with the residual's addition, rotary embedding with head norms, gated activations,
and the matrix product of few rows.

Each reads its rows once, computes in float32 and rounds where the separate operations would have written a tensor that
others read. They hold no state and ask nothing of the host, so a captured graph can hold them.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(values, weight, n: tl.constexpr, eps, offset):
    """Rows [..., padded] float32, zero behind n, times (offset + weight) over their root mean square."""
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=-1, keep_dims=True) / n + eps)
    return values * scale * (offset + weight)


@triton.jit
def rms_norm(x, weight, out, eps, offset, n: tl.constexpr, padded: tl.constexpr):
    """One program a row."""
    at = tl.arange(0, padded)
    row = tl.program_id(0).to(tl.int64) * n + at
    values = tl.load(x + row, mask=at < n, other=0.0).to(tl.float32)
    factors = tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + row, _normed(values, factors, n, eps, offset).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def add_rms_norm(
    x,
    residual,
    inner,
    outer,
    total,
    out,
    inner_eps,
    inner_offset,
    outer_eps,
    outer_offset,
    n: tl.constexpr,
    padded: tl.constexpr,
    has_inner: tl.constexpr,
    has_outer: tl.constexpr,
):
    """One program a row: total = residual + x or its norm; out = the norm of the total as it was rounded."""
    at = tl.arange(0, padded)
    keep = at < n
    row = tl.program_id(0).to(tl.int64) * n + at
    values = tl.load(x + row, mask=keep, other=0.0).to(tl.float32)
    before = tl.load(residual + row, mask=keep, other=0.0).to(tl.float32)
    if has_inner:
        values = _normed(values, tl.load(inner + at, mask=keep, other=0.0).to(tl.float32), n, inner_eps, inner_offset)
    rounded = (before + values).to(total.dtype.element_ty)
    tl.store(total + row, rounded, mask=keep)
    if has_outer:
        factors = tl.load(outer + at, mask=keep, other=0.0).to(tl.float32)
        normed = _normed(rounded.to(tl.float32), factors, n, outer_eps, outer_offset)
        tl.store(out + row, normed.to(out.dtype.element_ty), mask=keep)


@triton.jit
def rotate(
    states,
    cos,
    sin,
    query_weight,
    key_weight,
    eps,
    offset,
    row_stride,
    query_heads: tl.constexpr,
    heads: tl.constexpr,
    size: tl.constexpr,
    rotary_size: tl.constexpr,
    cos_size: tl.constexpr,
    block_heads: tl.constexpr,
    padded_half: tl.constexpr,
    padded_rest: tl.constexpr,
    has_norms: tl.constexpr,
):
    """A program turns `block_heads` heads of one row in place, after their norms if there are any.

    A head lies in three parts: the first and second of each pair, and the rest that does not turn.
    """
    half: tl.constexpr = rotary_size // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]  # [block_heads, 1]
    pair = tl.arange(0, padded_half)[None, :]  # [1, padded_half]
    keep = (head < heads) & (pair < half)
    left_at = states + row * row_stride + head * size + pair
    left = tl.load(left_at, mask=keep, other=0.0).to(tl.float32)
    right = tl.load(left_at + half, mask=keep, other=0.0).to(tl.float32)
    if has_norms:
        squares = tl.sum(left * left + right * right, axis=1, keep_dims=True)
        is_query = head < query_heads
        if rotary_size < size:
            other = rotary_size + tl.arange(0, padded_rest)[None, :]
            keep_rest = (head < heads) & (other < size)
            rest_at = states + row * row_stride + head * size + other
            rest = tl.load(rest_at, mask=keep_rest, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        scale = 1.0 / tl.sqrt(squares / size + eps)
        left *= scale * (offset + _by_head(query_weight, key_weight, pair, pair < half, is_query))
        right *= scale * (offset + _by_head(query_weight, key_weight, pair + half, pair < half, is_query))
        if rotary_size < size:
            rest *= scale * (offset + _by_head(query_weight, key_weight, other, other < size, is_query))
            tl.store(rest_at, rest.to(states.dtype.element_ty), mask=keep_rest)
    angle = row * cos_size + pair
    second: tl.constexpr = cos_size - half
    cos_left = tl.load(cos + angle, mask=pair < half, other=0.0).to(tl.float32)
    sin_left = tl.load(sin + angle, mask=pair < half, other=0.0).to(tl.float32)
    cos_right = tl.load(cos + angle + second, mask=pair < half, other=0.0).to(tl.float32)
    sin_right = tl.load(sin + angle + second, mask=pair < half, other=0.0).to(tl.float32)
    tl.store(left_at, (left * cos_left - right * sin_left).to(states.dtype.element_ty), mask=keep)
    tl.store(left_at + half, (right * cos_right + left * sin_right).to(states.dtype.element_ty), mask=keep)


@triton.jit
def _by_head(query_weight, key_weight, at, keep, is_query):
    """Each head's weights [block_heads, elements] float32."""
    query = tl.load(query_weight + at, mask=keep, other=0.0).to(tl.float32)
    key = tl.load(key_weight + at, mask=keep, other=0.0).to(tl.float32)
    return tl.where(is_query, query, key)


@triton.jit
def act_and_mul(merged, out, n, activation: tl.constexpr, block: tl.constexpr):
    """A program computes `block` elements of one row; merged [rows, 2 * n], out [rows, n]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    keep = at < n
    gate = tl.load(merged + row * 2 * n + at, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(merged + row * 2 * n + n + at, mask=keep, other=0.0).to(tl.float32)
    if activation == "silu":
        active = gate * tl.sigmoid(gate)
    elif activation == "gelu_tanh":  # 1 + tanh(u) = 2 * sigmoid(2 * u)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif activation == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        active = tl.where(gate < 0.0, 0.0, gate)  # a NaN stays one
    tl.store(out + row * n + at, (active * up).to(out.dtype.element_ty), mask=keep)


@triton.jit
def linear(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    n,
    k: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
):
    """A program computes `block_n` outputs of one row: x [rows, k], weight [n, k], out and residual [rows, n].

    Programs of the same outputs follow each other, so that only the first row's fetch the weight from memory. Few rows
    make nothing but this fetch matter: the loop is unrolled to have many loads under way.
    """
    row = tl.program_id(0) % rows
    output = (tl.program_id(0) // rows) * block_n + tl.arange(0, block_n)
    part = tl.arange(0, block_k)
    at = output.to(tl.int64)[:, None] * k + part[None, :]
    sums = tl.zeros([block_n, block_k], tl.float32)
    for start in tl.range(0, k, block_k, loop_unroll_factor=4):
        values = tl.load(x + row * k + start + part, mask=start + part < k, other=0.0).to(tl.float32)
        inside = (output < n)[:, None] & (start + part < k)[None, :]
        sums += tl.load(weight + at + start, mask=inside, other=0.0).to(tl.float32) * values[None, :]
    result = tl.sum(sums, axis=1)
    if has_bias:
        result += tl.load(bias + output, mask=output < n, other=0.0).to(tl.float32)
    if has_residual:
        result += tl.load(residual + row * n + output, mask=output < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + output, result.to(out.dtype.element_ty), mask=output < n)
