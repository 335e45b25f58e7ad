"""Kernels of segmented LoRA: sort tokens by slot, multiply with A (shrink), multiply with B and add (expand).

After Punica (Chen et al., "Punica: Multi-tenant LoRA serving", 2023) and S-LoRA (Sheng et al., 2023). How many tokens
each slot has is read from device memory, so a launch depends on the number of tokens alone and can be captured: it has
a program for each block of tokens that there may be at most, and those without tokens return at once.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_tokens(slots, order, counts, num_tokens, capacity, block: tl.constexpr):
    """List each slot's tokens: order [num_slots, capacity] int32, counts [num_slots] int32; a program for each slot."""
    slot = tl.program_id(0)
    found = 0
    for start in range(0, num_tokens, block):
        tokens = start + tl.arange(0, block)
        own = (tl.load(slots + tokens, mask=tokens < num_tokens, other=-1) == slot).to(tl.int32)
        places = found + tl.cumsum(own, 0) - 1
        tl.store(order + slot * capacity + places, tokens, mask=own > 0)
        found += tl.sum(own, 0)
    tl.store(counts + slot, found)


@triton.jit
def _segment(counts, num_slots, block_m: tl.constexpr, slots_padded: tl.constexpr):
    """This program's slot, its first token among the slot's, and how many the slot has; num_slots for no work."""
    program = tl.program_id(0)
    index = tl.arange(0, slots_padded)
    blocks = (tl.load(counts + index, mask=index < num_slots, other=0) + block_m - 1) // block_m
    ends = tl.cumsum(blocks, 0)
    slot = tl.sum((ends <= program).to(tl.int32), 0)
    before = tl.sum(tl.where(index < slot, blocks, 0), 0)
    slot = tl.minimum(slot, num_slots)
    count = tl.load(counts + slot, mask=slot < num_slots, other=0)
    return slot, (program - before) * block_m, count


@triton.jit
def shrink(
    x, a, scales, inner, order, counts, num_slots, capacity, num_tokens, k, stride_x, a_slot, scale_slot, per_split,
    rank: tl.constexpr, parts: tl.constexpr, block_m: tl.constexpr, block_k: tl.constexpr, slots_padded: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """inner [splits, parts, num_tokens, rank] float32 = scale * x @ A^T, each split over its own elements of a row.

    x [num_tokens, k], a [num_slots, parts, rank, k] and scales [num_slots, parts] strided by slot.
    """
    slot, first, count = _segment(counts, num_slots, block_m, slots_padded)
    if slot >= num_slots:
        return
    part, split = tl.program_id(1) % parts, tl.program_id(1) // parts
    scale = tl.load(scales + slot * scale_slot + part)
    if scale == 0.0:
        return
    lines, ranks = first + tl.arange(0, block_m), tl.arange(0, rank)
    tokens = tl.load(order + slot * capacity + lines, mask=lines < count, other=0).to(tl.int64)
    a_rows = a + slot.to(tl.int64) * a_slot + (part * rank + ranks).to(tl.int64) * k
    total = tl.zeros((block_m, rank), tl.float32)
    for start in range(split * per_split, tl.minimum((split + 1) * per_split, k), block_k):
        elements = start + tl.arange(0, block_k)
        inside = (elements < k) & (elements < (split + 1) * per_split)
        rows = tl.load(
            x + tokens[:, None] * stride_x + elements[None, :],
            mask=(lines < count)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        weights = tl.load(a_rows[None, :] + elements[:, None], mask=inside[:, None], other=0.0)  # [block_k, rank]
        total = tl.dot(rows, weights, total, input_precision=precision)
    place = inner + ((split * parts + part) * num_tokens + tokens[:, None]) * rank + ranks[None, :]
    tl.store(place, total * scale, mask=(lines < count)[:, None])


@triton.jit
def expand(
    inner, b, scales, out, order, counts, num_slots, capacity, num_tokens, stride_out, b_slot, scale_slot,
    size_0, size_1, size_2, splits: tl.constexpr,
    rank: tl.constexpr, parts: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, slots_padded: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """out [num_tokens, size_0 + size_1 + size_2] += inner @ B^T for each part; b [num_slots, all sizes, rank]."""
    slot, first, count = _segment(counts, num_slots, block_m, slots_padded)
    if slot >= num_slots:
        return
    block, part, begin, size = tl.program_id(1), 0, 0, size_0
    if parts > 1:
        blocks_0, blocks_1 = tl.cdiv(size_0, block_n), tl.cdiv(size_1, block_n)
        if block >= blocks_0:
            block, part, begin, size = block - blocks_0, 1, size_0, size_1
            if block >= blocks_1:
                block, part, begin, size = block - blocks_1, 2, size_0 + size_1, size_2
    if tl.load(scales + slot * scale_slot + part) == 0.0:
        return
    lines, ranks = first + tl.arange(0, block_m), tl.arange(0, rank)
    tokens = tl.load(order + slot * capacity + lines, mask=lines < count, other=0).to(tl.int64)
    total = tl.zeros((block_m, rank), tl.float32)
    for split in tl.static_range(splits):
        place = inner + ((split * parts + part) * num_tokens + tokens[:, None]) * rank + ranks[None, :]
        total += tl.load(place, mask=(lines < count)[:, None], other=0.0)
    columns = block * block_n + tl.arange(0, block_n)
    weights = tl.load(
        b + slot.to(tl.int64) * b_slot + (begin + columns).to(tl.int64)[None, :] * rank + ranks[:, None],
        mask=(columns < size)[None, :], other=0.0,
    )  # [rank, block_n]  # fmt: skip
    share = tl.dot(total.to(weights.dtype), weights, input_precision=precision)
    place = out + tokens[:, None] * stride_out + (begin + columns)[None, :]
    mask = (lines < count)[:, None] & (columns < size)[None, :]
    tl.store(place, (tl.load(place, mask=mask, other=0.0).to(tl.float32) + share).to(out.dtype.element_ty), mask=mask)
