"""Inputs of the next step of the same requests in Triton, in place of those of the previous step."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.core.batch.sampling_metadata import STRIDE
from slotline.kernels.triton_launcher import Launcher

BLOCK = 512
_STRIDE = tl.constexpr(STRIDE)


@triton.jit(do_not_specialize=["at", "num_values", "table_width"])
def _go_on(
    positions,  # [n] int64
    seq_lens,  # [n] int32
    counters,  # [n, 4] int64, the last of each row a counter of random numbers
    sent,  # int32, on the host: from `at` on each request's index among the changed tables or -1, then these tables
    rows,  # [n] int64
    table,  # [max_requests + 1, table_width] int32
    taken,  # [>= n, table_width] int32, the tables of the step's rows
    slots,  # [n] int64
    at,
    num_values,  # first columns of each changed table, 0 if no table changed
    table_width,
    block_size: tl.constexpr,
    first: tl.constexpr,
    drawn: tl.constexpr,
    block: tl.constexpr,
):
    """Move each request of one token to its next token. The grid is (n,).

    The first cache group's launch moves the inputs that all groups read.
    """
    here = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + here)
    if first:
        position += 1
        tl.store(positions + here, position)
        tl.store(seq_lens + here, tl.load(seq_lens + here) + 1)
        if drawn:
            tl.store(counters + here * 4 + 3, (tl.load(counters + here * 4 + 3).to(tl.uint64) + _STRIDE).to(tl.int64))
    column, change = position // block_size, tl.full([], -1, tl.int64)
    if num_values > 0:
        change = tl.load(sent + at + here).to(tl.int64)
    taken += here * table_width
    if change >= 0:
        values = sent + at + tl.num_programs(0) + change * num_values
        row = tl.load(rows + here) * table_width
        for start in tl.range(0, num_values, block):
            columns = start + tl.arange(0, block)
            held = columns < num_values
            found = tl.load(values + columns, held, 0)
            tl.store(taken + columns, found, held)
            tl.store(table + row + columns, found, held)
        own = tl.load(values + column)
    else:
        own = tl.load(taken + column)
    tl.store(slots + here, own.to(tl.int64) * block_size + position % block_size)


advance_decode_batch = Launcher(_go_on)
