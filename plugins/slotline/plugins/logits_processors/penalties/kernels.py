"""Triton kernels of the penalties. `device_counts` launches them and says what the tables hold."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

IN_PROMPT = tl.constexpr(1 << 30)
"""Flag of a count; the bits below are the number of times that a token stands in the output."""


@triton.jit(do_not_specialize_on_alignment=["rows"])
def clear_rows(counts, num_distinct, rows, vocab_size, block: tl.constexpr):
    """Clear `block` counts of a row in each program."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    places = tl.program_id(1) * block + tl.arange(0, block)
    tl.store(counts + row * vocab_size + places, 0, places < vocab_size)
    if tl.program_id(1) == 0:
        tl.store(num_distinct + row, 0)


@triton.jit(do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["entries"])
def count_tokens(counts, distinct, num_distinct, capacity, vocab_size, entries, num_entries, block: tl.constexpr):
    """Count `block` new tokens in each program: `entries` [3, num_entries] is row, token, if in the prompt."""
    places = tl.program_id(0) * block + tl.arange(0, block)
    held = places < num_entries
    row = tl.load(entries + places, held, 0).to(tl.int64)
    token = tl.load(entries + num_entries + places, held, 0)
    prompt = tl.load(entries + 2 * num_entries + places, held, 0) != 0
    held &= (token >= 0) & (token < vocab_size)
    at = counts + row * vocab_size + token
    before = tl.atomic_or(at, IN_PROMPT, held & prompt)
    before_output = tl.atomic_add(at, 1, held & ~prompt)
    first = held & (tl.where(prompt, before, before_output) == 0)
    place = tl.atomic_add(num_distinct + row, 1, first)
    tl.store(distinct + row * capacity + place, token, first)


@triton.jit(
    do_not_specialize=["num_drafts", "n"],
    do_not_specialize_on_alignment=["rows", "penalties", "draft_counts", "drafts"],
)
def penalise(
    logits,  # [n, vocab_size] float32, in and out
    stride,
    rows,  # [n] int32
    penalties,  # [3, n] float32: presence, frequency, repetition
    draft_counts,  # [n] int32
    drafts,  # [n, num_drafts] int32
    num_drafts,
    counts,
    distinct,
    num_distinct,
    capacity,
    vocab_size,
    n,
    block: tl.constexpr,
    width: tl.constexpr,  # at least num_drafts, a power of 2
):
    """Penalise `block` of a row's distinct tokens in each program.

    Each is written once, and no written value is read.
    """
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    logits += i.to(tl.int64) * stride
    counts += row * vocab_size
    drafts += i * num_drafts
    drafted = tl.load(draft_counts + i)
    presence, frequency = tl.load(penalties + i), tl.load(penalties + n + i)
    repetition = tl.load(penalties + 2 * n + i)
    places = tl.program_id(1) * block + tl.arange(0, block)
    held = places < tl.load(num_distinct + row)
    token = tl.load(distinct + row * capacity + places, held, 0)
    times = tl.load(counts + token, held, 0) & (IN_PROMPT - 1)
    for j in range(drafted):
        times += (tl.load(drafts + j) == token).to(tl.int32)
    x = tl.load(logits + token, held, 0.0)
    tl.store(logits + token, _penalised(x, times, presence, frequency, repetition), held)
    if (tl.program_id(1) == 0) & (drafted > 0):  # drafts that the row has not seen
        index = tl.arange(0, width)
        draft = tl.load(drafts + index, index < drafted, -1)
        inside = (draft >= 0) & (draft < vocab_size)
        missing = inside & (tl.load(counts + draft, inside, 1) == 0)
        equal = (draft[:, None] == draft[None, :]).to(tl.int32)
        missing &= tl.sum(tl.where(index[None, :] < index[:, None], equal, 0), 1) == 0  # its first position
        y = tl.load(logits + draft, missing, 0.0)
        tl.store(logits + draft, _penalised(y, tl.sum(equal, 1), presence, frequency, repetition), missing)


@triton.jit
def _penalised(x, times, presence, frequency, repetition):
    x = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
    x = x - frequency * times.to(tl.float32)
    return x - tl.where(times > 0, presence, 0.0)
