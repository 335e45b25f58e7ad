"""Triton kernels over rows: norms with residuals, rotary embedding with head norms, gated activations, small products.

Each reads its rows once, computes in float32 and rounds where the separate operations would have written a tensor that
others read. They have no state and need nothing from the host, so they can be captured.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _begin(early: tl.constexpr):
    """Let the next kernel start, and wait for the previous one. A kernel that is not started early need not wait."""
    if early:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _normed(values, weight, n: tl.constexpr, eps, offset):
    """Return rows [..., padded] float32, zero after n, times (offset + weight) over their root mean square."""
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=-1, keep_dims=True) / n + eps)
    return values * scale * (offset + weight)


@triton.jit
def rms_norm(x, weight, out, eps, offset, n: tl.constexpr, padded: tl.constexpr, early: tl.constexpr):
    """Norm one row in each program."""
    _begin(early)
    at = tl.arange(0, padded)
    row = tl.program_id(0).to(tl.int64) * n + at
    values = tl.load(x + row, mask=at < n, other=0.0).to(tl.float32)
    factors = tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + row, _normed(values, factors, n, eps, offset).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def gated_rms_norm(
    x,
    gate,
    weight,
    out,
    eps,
    n,
    gate_row,
    size: tl.constexpr,
    padded: tl.constexpr,
    gate_first: tl.constexpr,
    early: tl.constexpr,
):
    """Norm a group of a row: x * silu(gate), or x, which is then multiplied by silu(gate). Grid: (rows, groups)."""
    _begin(early)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * size
    at = tl.arange(0, padded)
    keep = at < size
    values = tl.load(x + row * n + first + at, mask=keep, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_row + first + at, mask=keep, other=0.0).to(tl.float32)
    gates = gates / (1.0 + tl.exp(-gates))
    factors = tl.load(weight + first + at, mask=keep, other=0.0).to(tl.float32)
    if gate_first:
        values = _normed(values * gates, factors, size, eps, 0.0)
    else:
        values = _normed(values, factors, size, eps, 0.0) * gates
    tl.store(out + row * n + first + at, values.to(out.dtype.element_ty), mask=keep)


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
    row_stride,
    part_stride,
    n: tl.constexpr,
    padded: tl.constexpr,
    parts: tl.constexpr,
    has_inner: tl.constexpr,
    has_outer: tl.constexpr,
    early: tl.constexpr,
):
    """Compute total = residual + x or its norm, and out = the norm of the rounded total, with one program per row.

    x may be the sum of several parts of rows, and its rows may be parts of wider rows.
    """
    _begin(early)
    at = tl.arange(0, padded)
    keep = at < n
    row = tl.program_id(0).to(tl.int64) * n + at
    x += tl.program_id(0).to(tl.int64) * row_stride + at
    values = tl.load(x, mask=keep, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        values += tl.load(x + part * part_stride, mask=keep, other=0.0).to(tl.float32)
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
def angles(
    positions,
    frequencies,
    cos,
    sin,
    scaling,
    half: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    early: tl.constexpr,
):
    """Compute one token in each program: cosines and sines [tokens, width] of position times frequency, scaled."""
    _begin(early)
    at = tl.arange(0, padded)
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.float32)
    angle = position * tl.load(frequencies + at % half, mask=at < width, other=0.0)
    to = row * width + at
    tl.store(cos + to, (tl.cos(angle) * scaling).to(cos.dtype.element_ty), mask=at < width)
    tl.store(sin + to, (tl.sin(angle) * scaling).to(sin.dtype.element_ty), mask=at < width)


@triton.jit
def rotate(
    states,
    cos,
    sin,
    query_weight,
    key_weight,
    keys,
    values,
    slots,
    eps,
    offset,
    row_stride,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    page,
    query_heads: tl.constexpr,
    turned: tl.constexpr,
    heads: tl.constexpr,
    size: tl.constexpr,
    rotary_size: tl.constexpr,
    cos_size: tl.constexpr,
    block_heads: tl.constexpr,
    padded_half: tl.constexpr,
    padded_rest: tl.constexpr,
    has_norms: tl.constexpr,
    has_cache: tl.constexpr,
    early: tl.constexpr,
):
    """Norm and rotate heads below `turned` in place. A program handles `block_heads` heads of one row.

    With a cache, heads from `query_heads` on are also stored at the row's slot: the keys, and from `turned` on the same
    number of values. A head has three parts: the first and second of each pair, and the rest that is not rotated.
    """
    _begin(early)
    half: tl.constexpr = rotary_size // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]  # [block_heads, 1]
    pair = tl.arange(0, padded_half)[None, :]  # [1, padded_half]
    there = (head < heads) & (pair < half)
    left_at = states + row * row_stride + head * size + pair
    left = tl.load(left_at, mask=there, other=0.0).to(tl.float32)
    right = tl.load(left_at + half, mask=there, other=0.0).to(tl.float32)
    other = rotary_size + tl.arange(0, padded_rest)[None, :]
    rest_there = (head < heads) & (other < size)
    rest_at = states + row * row_stride + head * size + other
    rest = tl.zeros([block_heads, padded_rest], tl.float32)
    if rotary_size < size:
        rest = tl.load(rest_at, mask=rest_there, other=0.0).to(tl.float32)
    is_turned = head < turned
    if has_norms:
        squares = tl.sum(left * left + right * right, axis=1, keep_dims=True)
        squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        scale = 1.0 / tl.sqrt(squares / size + eps)
        is_query = head < query_heads
        left_weight = _by_head(query_weight, key_weight, pair, pair < half, is_query)
        right_weight = _by_head(query_weight, key_weight, pair + half, pair < half, is_query)
        left = tl.where(is_turned, left * scale * (offset + left_weight), left)
        right = tl.where(is_turned, right * scale * (offset + right_weight), right)
        if rotary_size < size:
            rest_weight = _by_head(query_weight, key_weight, other, other < size, is_query)
            rest = tl.where(is_turned, rest * scale * (offset + rest_weight), rest)
            tl.store(rest_at, rest.to(states.dtype.element_ty), mask=rest_there & is_turned)
    angle = row * cos_size + pair
    second: tl.constexpr = cos_size - half
    cos_left = tl.load(cos + angle, mask=pair < half, other=0.0).to(tl.float32)
    sin_left = tl.load(sin + angle, mask=pair < half, other=0.0).to(tl.float32)
    cos_right = tl.load(cos + angle + second, mask=pair < half, other=0.0).to(tl.float32)
    sin_right = tl.load(sin + angle + second, mask=pair < half, other=0.0).to(tl.float32)
    new_left = tl.where(is_turned, left * cos_left - right * sin_left, left).to(states.dtype.element_ty)
    new_right = tl.where(is_turned, right * cos_right + left * sin_right, right).to(states.dtype.element_ty)
    tl.store(left_at, new_left, mask=there & is_turned)
    tl.store(left_at + half, new_right, mask=there & is_turned)
    if has_cache:
        slot = tl.load(slots + row)
        block, inside = slot // page, slot % page
        stored = tl.where(slot >= 0, heads, 0)  # heads below this one
        is_key = (head >= query_heads) & is_turned & (head < stored)
        to = keys + block * k_block + inside * k_token + (head - query_heads) * k_head
        _store_head(to, new_left, new_right, rest, pair, other, there & is_key, rest_there & is_key, half)
        is_value = (head >= turned) & (head < stored)
        to = values + block * v_block + inside * v_token + (head - turned) * v_head
        _store_head(to, new_left, new_right, rest, pair, other, there & is_value, rest_there & is_value, half)


@triton.jit
def _store_head(to, left, right, rest, pair, other, keep, keep_rest, half: tl.constexpr):
    """Store the three parts of each head at its place in a cache."""
    tl.store(to + pair, left, mask=keep)
    tl.store(to + pair + half, right, mask=keep)
    tl.store(to + other, rest.to(left.dtype), mask=keep_rest)


@triton.jit
def _by_head(query_weight, key_weight, at, keep, is_query):
    """Return each head's weights [block_heads, elements] float32."""
    query = tl.load(query_weight + at, mask=keep, other=0.0).to(tl.float32)
    key = tl.load(key_weight + at, mask=keep, other=0.0).to(tl.float32)
    return tl.where(is_query, query, key)


@triton.jit
def activated(gate, activation: tl.constexpr):
    """Apply one of `kernels.ACTIVATIONS` to float32 values."""
    if activation == "silu":
        active = gate * tl.sigmoid(gate)
    elif activation == "gelu_tanh":  # 1 + tanh(u) = 2 * sigmoid(2 * u)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif activation == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        active = tl.where(gate < 0.0, 0.0, gate)  # a NaN stays one
    return active


@triton.jit
def act_and_mul(merged, out, n, row_stride, activation: tl.constexpr, block: tl.constexpr, early: tl.constexpr):
    """Compute `block` elements of one row in each program: merged [rows, 2 * n] in wider rows, out [rows, n]."""
    _begin(early)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    keep = at < n
    gate = tl.load(merged + row * row_stride + at, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(merged + row * row_stride + n + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, (activated(gate, activation) * up).to(out.dtype.element_ty), mask=keep)
