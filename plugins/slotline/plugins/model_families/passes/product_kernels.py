"""Triton kernels for matrix products of few rows, with what precedes and follows them inside.

At few rows nothing but fetching the weight matters. So a product norms its own input, adds the residual or activates
the gate itself, and where the device can start a kernel early (programmatic dependent launch) it fetches its first
weights while the kernel before it still runs: weights are the one input that no kernel writes.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slotline.plugins.model_families.passes.triton_kernels import activated


@triton.jit
def _part(source, at, start, k: tl.constexpr, block_k: tl.constexpr):
    """Load elements [block_k] from `start` on, zero after k."""
    if k % block_k == 0:
        values = tl.load(source + start + at)
    else:
        values = tl.load(source + start + at, mask=start + at < k, other=0.0)
    return values


@triton.jit
def linear(
    x,
    weight,
    bias,
    norm,
    residual,
    out,
    rows,
    n,
    eps,
    offset,
    k: tl.constexpr,
    block_k: tl.constexpr,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    has_residual: tl.constexpr,
    activation: tl.constexpr,
    early: tl.constexpr,
):
    """Multiply one row by two rows of the weight in each program: x [rows, k], out and residual [rows, n].

    These are two neighbouring outputs or, with an activation, gate and up of one output ``activation(gate) * up`` under
    a weight of [2 * n, k], gate first. A norm's scale multiplies the finished sums, so that the squares are summed in
    the same pass over x. Programs of the same weights follow each other, so that only the first row's fetch them from
    memory. All tensors are one-dimensional. Others would change their layout through shared memory, and wait for the
    first weights before the next kernel may start.
    """
    has_gate: tl.constexpr = activation != "none"
    row, at = tl.program_id(0) % rows, tl.arange(0, block_k)
    first = tl.program_id(0) // rows * (1 if has_gate else 2)
    second = first + n if has_gate else tl.minimum(first + 1, n - 1)
    first_weight, second_weight = weight + first.to(tl.int64) * k, weight + second.to(tl.int64) * k
    x += row * k
    if early:
        gdc_launch_dependents()
    weights, others = _part(first_weight, at, 0, k, block_k), _part(second_weight, at, 0, k, block_k)
    if has_norm:
        factors = _part(norm, at, 0, k, block_k)
    if early:
        gdc_wait()
    values = _part(x, at, 0, k, block_k).to(tl.float32)
    if has_norm:
        squares = values * values
        values *= offset + factors.to(tl.float32)
    sums, other_sums = weights.to(tl.float32) * values, others.to(tl.float32) * values
    for start in tl.range(block_k, k, block_k, loop_unroll_factor=4):
        weights, others = _part(first_weight, at, start, k, block_k), _part(second_weight, at, start, k, block_k)
        values = _part(x, at, start, k, block_k).to(tl.float32)
        if has_norm:
            squares += values * values
            values *= offset + _part(norm, at, start, k, block_k).to(tl.float32)
        sums += weights.to(tl.float32) * values
        other_sums += others.to(tl.float32) * values
    result, other = tl.sum(sums), tl.sum(other_sums)
    if has_norm:
        scale = 1.0 / tl.sqrt(tl.sum(squares) / k + eps)
        result *= scale
        other *= scale
    if has_bias:
        result += tl.load(bias + first).to(tl.float32)
        other += tl.load(bias + second).to(tl.float32)
    to = row.to(tl.int64) * n + first
    if has_gate:
        tl.store(out + to, (activated(result, activation) * other).to(out.dtype.element_ty))
    else:
        there = first + 1 < n
        if has_residual:
            result += tl.load(residual + to).to(tl.float32)
            other += tl.load(residual + to + 1, mask=there, other=0.0).to(tl.float32)
        tl.store(out + to, result.to(out.dtype.element_ty))
        tl.store(out + to + 1, other.to(out.dtype.element_ty), mask=there)


@triton.jit
def _column_tile(weight, output, part, start, n, k: tl.constexpr, block_k: tl.constexpr):
    """Load weights [block_n, block_k] of the outputs from element `start` on. Outputs beyond n repeat the last."""
    at = tl.minimum(output, n - 1).to(tl.int64)[:, None] * k + (start + part)[None, :]
    if k % block_k == 0:
        tile = tl.load(weight + at)
    else:
        tile = tl.load(weight + at, mask=(start + part < k)[None, :], other=0.0)
    return tile


@triton.jit
def _fetch(weight, output, n, start, k: tl.constexpr, columns: tl.constexpr):
    """Ask for `columns` elements of each output's weights to be brought into the L2 cache."""
    column = start + tl.arange(0, columns // 64) * 64  # a line is 128 bytes
    at = tl.minimum(output, n - 1).to(tl.int64)[:, None] * k + tl.minimum(column, k - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"])
def dot_linear(
    x,
    weight,
    bias,
    out,
    rows,
    n,
    k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    parts: tl.constexpr,
    has_bias: tl.constexpr,
    activation: tl.constexpr,
    fetched: tl.constexpr,
    early: tl.constexpr,
):
    """Compute `block_n` outputs of `block_m` rows on the matrix units in each program (see `linear`).

    The weight is the left operand, which may be large while the right operand has few columns. With several parts, each
    sums its elements into its own out [parts, rows, n]. The first part adds the bias.
    """
    has_gate: tl.constexpr = activation != "none"
    each: tl.constexpr = (k + parts * block_k - 1) // (parts * block_k) * block_k
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    row, part = tl.program_id(1) * block_m + tl.arange(0, block_m), tl.arange(0, block_k)
    number = tl.program_id(2)
    if early:
        gdc_launch_dependents()
        if fetched > 0:
            _fetch(weight, output, n, number * each, k, fetched)
            if has_gate:
                _fetch(weight + n.to(tl.int64) * k, output, n, number * each, k, fetched)
        gdc_wait()
    sums = tl.zeros([block_n, block_m], tl.float32)
    other_sums = tl.zeros([block_n, block_m], tl.float32)
    x_at = x + row.to(tl.int64)[None, :] * k
    for start in tl.range(number * each, tl.minimum(number * each + each, k), block_k, num_stages=stages):
        here = (row < rows)[None, :]
        if k % block_k != 0:
            here = here & (start + part < k)[:, None]
        values = tl.load(x_at + (start + part)[:, None], mask=here, other=0.0)  # [block_k, block_m]
        sums = tl.dot(_column_tile(weight, output, part, start, n, k, block_k), values, sums)
        if has_gate:
            tile = _column_tile(weight + n.to(tl.int64) * k, output, part, start, n, k, block_k)
            other_sums = tl.dot(tile, values, other_sums)
    at = row.to(tl.int64)[None, :] * n + output[:, None]
    if has_bias:
        shift = tl.load(bias + output, mask=output < tl.where(number == 0, n, 0), other=0.0)
        sums += shift.to(tl.float32)[:, None]
    if has_gate:
        if has_bias:
            other_sums += tl.load(bias + n + output, mask=output < n, other=0.0).to(tl.float32)[:, None]
        sums = activated(sums, activation) * other_sums
    to = out + number.to(tl.int64) * rows * n + at
    tl.store(to, sums.to(out.dtype.element_ty), mask=(output < n)[:, None] & (row < rows)[None, :])
