"""Triton kernels of the penalties. `device_counts` launches them and says what the tables hold."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

TIMES = tl.constexpr(32)
"""First bit of an entry's number of times that a token stands in the output. The bits below are the token."""
ONCE = tl.constexpr(1 << 32)
DRAFT_BLOCK = tl.constexpr(256)
"""Entries that drafts are compared with at a time."""


@triton.jit
def take_news(
    news,  # [m, 4] int32: row, number of new tokens, where they begin in `values`, whether they replace the row's list
    values,  # int32: new tokens, or all distinct tokens and then how often each stands in the output
    entries,  # [max_requests, capacity] int64, in and out
    lengths,  # [max_requests] int32, in and out
    capacity,
    vocab_size,
    block: tl.constexpr,
):
    """Add new tokens to the list of a row, or write it anew. Each program does one row."""
    news += tl.program_id(0) * 4
    row = tl.load(news).to(tl.int64)
    number, values = tl.load(news + 1), values + tl.load(news + 2)
    entries += row * capacity
    index = tl.arange(0, block)
    if tl.load(news + 3) != 0:
        for start in range(0, number, block):
            places = start + index
            token = tl.load(values + places, places < number, 0).to(tl.int64)
            times = tl.load(values + number + places, places < number, 0).to(tl.int64)
            tl.store(entries + places, (times << TIMES) | token, places < number)
        tl.store(lengths + row, number)
    else:
        length = tl.load(lengths + row)
        for j in range(number):
            token = tl.load(values + j)
            found = ((token < 0) | (token >= vocab_size)).to(tl.int32)
            for start in range(0, length, block):
                places = start + index
                known = tl.load(entries + places, places < length, -1)
                same = (known.to(tl.int32) == token) & (places < length)
                tl.store(entries + places, known + ONCE, same)
                found += tl.sum(same.to(tl.int32), 0)
            if found == 0:
                tl.store(entries + length, token.to(tl.int64) + ONCE)
                length += 1
            tl.debug_barrier()  # the next token reads what was written
        tl.store(lengths + row, length)


@triton.jit(do_not_specialize=["num_drafts"])
def penalise(
    logits,  # [n, vocab_size] float32, in and out
    stride,
    wanted,  # [n, 8] int32: row, presence, frequency and repetition as float32, number of drafts
    drafts,  # [n, num_drafts] int32
    num_drafts,
    entries,  # [max_requests, capacity] int64
    lengths,  # [max_requests] int32
    capacity,
    vocab_size,
    block: tl.constexpr,
    width: tl.constexpr,  # at least num_drafts, a power of 2
):
    """Penalise `block` of a row's distinct tokens in each program.

    Each is written once, and no written value is read.
    """
    i = tl.program_id(0)
    wanted += i * 8
    row, drafted = tl.load(wanted).to(tl.int64), tl.load(wanted + 4)
    presence, frequency = _number(wanted + 1), _number(wanted + 2)
    repetition = _number(wanted + 3)
    logits += i.to(tl.int64) * stride
    entries += row * capacity
    drafts += i * num_drafts
    places = tl.program_id(1) * block + tl.arange(0, block)
    length = tl.load(lengths + row)
    held = places < length
    entry = tl.load(entries + places, held, 0)
    token, times = entry.to(tl.int32), (entry >> TIMES).to(tl.int32)
    for j in range(drafted):
        times += (tl.load(drafts + j) == token).to(tl.int32)
    x = tl.load(logits + token, held, 0.0)
    tl.store(logits + token, _penalised(x, times, presence, frequency, repetition), held)
    if (tl.program_id(1) == 0) & (drafted > 0):  # drafts that the row has not seen
        index = tl.arange(0, width)
        draft = tl.load(drafts + index, index < drafted, -1)
        seen = tl.zeros([width], tl.int32)
        for start in range(0, length, DRAFT_BLOCK):
            others = start + tl.arange(0, DRAFT_BLOCK)
            known = tl.load(entries + others, others < length, -1).to(tl.int32)
            seen += tl.sum((draft[:, None] == known[None, :]).to(tl.int32), 1)
        equal = (draft[:, None] == draft[None, :]).to(tl.int32)
        seen += tl.sum(tl.where(index[None, :] < index[:, None], equal, 0), 1)  # only its first position counts
        missing = (seen == 0) & (draft >= 0) & (draft < vocab_size)
        y = tl.load(logits + draft, missing, 0.0)
        tl.store(logits + draft, _penalised(y, tl.sum(equal, 1), presence, frequency, repetition), missing)


@triton.jit
def _number(place):
    return tl.load(place).to(tl.float32, bitcast=True)


@triton.jit
def _penalised(x, times, presence, frequency, repetition):
    x = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
    x = x - frequency * times.to(tl.float32)
    return x - tl.where(times > 0, presence, 0.0)
