"""Triton kernels around the grouped products of a mixture, for rows in order of their experts.

Rows from the end of the last expert of this rank on belong to experts of other ranks. Their programs end at once, and
nothing reads these rows. The numbers of rows are read on the device, so the kernels can be captured.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.plugins.model_families.passes.triton_kernels import activated


@triton.jit
def take_rows(x, order, ends, rows, places, size, last, choices: tl.constexpr, block: tl.constexpr):
    """Copy the tokens of the experts, and note where the row of each choice is.

    Grid: (choices of all tokens, blocks of a row). x [tokens, size], order [n] int64 of the choices sorted by expert,
    ends [experts] int32, rows [n, size], places [n] int32.
    """
    row = tl.program_id(0)
    choice = tl.load(order + row)
    if tl.program_id(1) == 0:
        tl.store(places + choice, row)
    if row < tl.load(ends + last):
        at = tl.program_id(1) * block + tl.arange(0, block)
        values = tl.load(x + choice // choices * size + at, mask=at < size)
        tl.store(rows + row.to(tl.int64) * size + at, values, mask=at < size)


@triton.jit
def gate_rows(merged, ends, out, size, last, activation: tl.constexpr, block: tl.constexpr):
    """Compute activation(gate) * up. Grid: (rows, blocks of a row). merged [n, 2 * size], out [n, size]."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends + last):
        at = tl.program_id(1) * block + tl.arange(0, block)
        gate = tl.load(merged + row * 2 * size + at, mask=at < size).to(tl.float32)
        up = tl.load(merged + row * 2 * size + size + at, mask=at < size).to(tl.float32)
        tl.store(out + row * size + at, (activated(gate, activation) * up).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def join_rows(rows, places, own, weights, out, size, experts, choices: tl.constexpr, block: tl.constexpr):
    """Add the rows of a token's choices times their weights, those of this rank, in order of the choices.

    Grid: (tokens, blocks of a row). rows [n, size], places [n] int32, own [tokens, choices] int32 with `experts` for an
    expert of another rank, weights [tokens, choices], out [tokens, size].
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for number in range(choices):
        choice = token * choices + number
        if tl.load(own + choice) < experts:
            row = tl.load(places + choice).to(tl.int64)
            values = tl.load(rows + row * size + at, mask=at < size, other=0.0).to(tl.float32)
            total += values * tl.load(weights + choice).to(tl.float32)
    tl.store(out + token * size + at, total.to(out.dtype.element_ty), mask=at < size)
