"""Data that a layer keeps of verified requests, and the rollback.

A verified request has up to `most` tokens, 1 + drafts.

A request with one token has nothing to roll back, and a request with more than `most` tokens is not a verification.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_state(state, before, starts, slots, has_state, most, s_slot, size, block: tl.constexpr):
    """Keep the states before the step, zeros for requests that start: before [rows, size]. Grid: (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(starts + row + 1) - tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (length < 2) | (length > most):
        return
    place = tl.program_id(1) * block + tl.arange(0, block)
    known = place < tl.where(tl.load(has_state + row) != 0, size, 0)
    value = tl.load(state + slot * s_slot + place, mask=known, other=0.0)
    tl.store(before + row * size + place, value, mask=place < size)


@triton.jit
def keep_tokens(source, kept, starts, slots, most, s_token, s_part, size, part, block: tl.constexpr):
    """Keep an input of the verified tokens: kept [rows, most, size]. Grid: (rows * most, blocks).

    The input's token consists of size / part contiguous parts, with stride `s_part`.
    """
    row = (tl.program_id(0) // most).to(tl.int64)
    number = tl.program_id(0) % most
    begin = tl.load(starts + row).to(tl.int64)
    length = tl.load(starts + row + 1) - begin
    slot = tl.load(slots + row)
    if (slot < 0) | (length < 2) | (length > most) | (number >= length):
        return
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < size
    value = tl.load(source + (begin + number) * s_token + place // part * s_part + place % part, mask=inside, other=0.0)
    tl.store(kept + (row * most + number) * size + place, value, mask=inside)


@triton.jit
def go_back(state, before, starts, slots, accepted, again_starts, again_slots, most, s_slot, size, block: tl.constexpr):
    """Restore the states before the step of requests that lose tokens. Grid: (rows, blocks).

    The kernel also selects the kept tokens to compute again. Row 2 r of the batch of `again_starts` and `again_slots`
    has the accepted tokens of request r. Row 2 r + 1 has the rest, which is padding.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(starts + row + 1) - tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.load(accepted + row)
    goes = (slot >= 0) & (length >= 2) & (length <= most) & (count < length)
    if tl.program_id(1) == 0:
        tl.store(again_starts + 2 * row, (row * most).to(tl.int32))
        tl.store(again_starts + 2 * row + 1, (row * most + tl.where(goes, count, 0)).to(tl.int32))
        tl.store(again_starts + 2 * row + 2, ((row + 1) * most).to(tl.int32), mask=row + 1 == tl.num_programs(0))
        tl.store(again_slots + 2 * row, tl.where(goes, slot, -1).to(tl.int32))
        tl.store(again_slots + 2 * row + 1, -1)
    if goes:
        place = tl.program_id(1) * block + tl.arange(0, block)
        value = tl.load(before + row * size + place, mask=place < size, other=0.0)
        tl.store(state + slot * s_slot + place, value, mask=place < size)
