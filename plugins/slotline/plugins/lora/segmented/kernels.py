"""Kernels of segmented LoRA: sort tokens by slot, multiply with A (shrink), multiply with B and add (expand).

After Punica (Chen et al., "Punica: Multi-tenant LoRA serving", 2023) and S-LoRA (Sheng et al., 2023). Tokens of one
slot are divided into blocks. The list of blocks is in device memory, so a launch depends only on the number of tokens
and can be captured. It has programs for the largest possible number of blocks, and programs without tokens return. If
the device can start a kernel early (programmatic dependent launch), expanding fetches its weights and outputs while
shrinking still runs.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_tokens"])
def sort_tokens(
    slots, block_slots, block_tokens, num_tokens, max_blocks,
    block_m: tl.constexpr, slots_padded: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Divide each slot's tokens into blocks, with one program for each slot.

    Writes block_slots [max_blocks] int32, -1 after the last block, and block_tokens [blocks, block_m] int32, -1 in the
    rest of a block that is not full.
    """
    slot, index = tl.program_id(0), tl.arange(0, slots_padded)
    totals = tl.zeros((slots_padded,), tl.int32)
    for start in range(0, num_tokens, chunk):
        tokens = start + tl.arange(0, chunk)
        given = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1)
        totals += tl.sum((given[:, None] == index[None, :]).to(tl.int32), 0)
    blocks = (totals + block_m - 1) // block_m
    first, mine = tl.sum(tl.where(index < slot, blocks, 0), 0), tl.sum(tl.where(index == slot, blocks, 0), 0)
    found = 0
    for start in range(0, num_tokens, chunk):
        tokens = start + tl.arange(0, chunk)
        own = (tl.load(slots + tokens, mask=tokens < num_tokens, other=-1) == slot).to(tl.int32)
        places = found + tl.cumsum(own, 0) - 1
        tl.store(block_tokens + first * block_m + places, tokens, mask=own > 0)
        found += tl.sum(own, 0)
    behind = found + tl.arange(0, block_m)
    tl.store(block_tokens + first * block_m + behind, -1, mask=behind < mine * block_m)
    for block in range(first, first + mine):
        tl.store(block_slots + block, slot)
    if slot == 0:
        for block in range(tl.sum(blocks, 0), max_blocks):
            tl.store(block_slots + block, -1)


@triton.jit(do_not_specialize=["num_tokens"])
def shrink(
    x, a, inner, block_slots, block_tokens, places, num_tokens, k, stride_x, a_slot, per_split,
    width: tl.constexpr, padded: tl.constexpr, block_m: tl.constexpr, block_k: tl.constexpr,
    precision: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Compute inner [splits, num_tokens, width] float32 = x @ A^T, each split over its own elements of a row.

    x is [num_tokens, k]. a is [num_slots, width, k], strided by place, which is `places` [num_slots] int32 for a slot.
    width is the sum of the ranks of all parts.
    """
    if early:
        gdc_launch_dependents()
    block, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(block_slots + block)
    tokens = tl.load(block_tokens + block * block_m + tl.arange(0, block_m))
    if slot < 0:
        return
    ranks, mask = tl.arange(0, padded), (tokens >= 0)[:, None]
    rows = x + tokens.to(tl.int64)[:, None] * stride_x
    weights = a + tl.load(places + slot).to(tl.int64) * a_slot + ranks.to(tl.int64)[None, :] * k
    total, end = tl.zeros((block_m, padded), tl.float32), tl.minimum((split + 1) * per_split, k)
    for start in range(split * per_split, end, block_k):
        elements = start + tl.arange(0, block_k)
        inside = elements < end
        left = tl.load(rows + elements[None, :], mask=mask & inside[None, :], other=0.0)
        right = tl.load(
            weights + elements[:, None], mask=inside[:, None] & (ranks < width)[None, :], other=0.0
        )  # [block_k, padded]  # fmt: skip
        total = tl.dot(left, right, total, input_precision=precision)
    place = inner + (split * num_tokens + tokens[:, None]) * width + ranks[None, :]
    tl.store(place, total, mask=mask & (ranks < width)[None, :])


@triton.jit(do_not_specialize=["inner_split"])
def expand(
    inner, b, scales, out, block_slots, block_tokens, places, inner_split, inner_token, stride_out, b_slot, scale_slot,
    size_0, size_1, size_2,
    splits: tl.constexpr, rank: tl.constexpr, parts: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    behind: tl.constexpr, single: tl.constexpr, precision: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Add scale * inner @ B^T to out [num_tokens, size_0 + size_1 + size_2], part by part.

    inner is [splits, num_tokens, parts * rank] strided by split and token, or unless `single` [splits, num_tokens,
    num_slots * parts * rank], with the slots in the order of `places`. With `behind` it comes from the kernel that
    wrote out. b [num_slots, all sizes, rank] and scales [num_slots, parts] are strided by slot. A part with scale 0 is
    unchanged.
    """
    if early:
        gdc_launch_dependents()
    column, block, part, begin, size = tl.program_id(0), tl.program_id(1), 0, 0, size_0
    slot = tl.load(block_slots + block)
    tokens = tl.load(block_tokens + block * block_m + tl.arange(0, block_m))
    if slot < 0:
        if early:
            gdc_wait()  # later work must wait for the previous kernel, too
        return
    if parts > 1:
        columns_0, columns_1 = tl.cdiv(size_0, block_n), tl.cdiv(size_1, block_n)
        if column >= columns_0:
            column, part, begin, size = column - columns_0, 1, size_0, size_1
            if column >= columns_1:
                column, part, begin, size = column - columns_1, 2, size_0 + size_1, size_2
    scale = tl.load(scales + slot * scale_slot + part)
    if scale == 0.0:
        if early:
            gdc_wait()
        return
    first = part * rank
    if not single:
        first += tl.load(places + slot) * (parts * rank)
    ranks, columns = tl.arange(0, rank), column * block_n + tl.arange(0, block_n)
    weights = tl.load(
        b + slot.to(tl.int64) * b_slot + (begin + columns).to(tl.int64)[None, :] * rank + ranks[:, None],
        mask=(columns < size)[None, :], other=0.0,
    )  # [rank, block_n]  # fmt: skip
    there = out + tokens.to(tl.int64)[:, None] * stride_out + (begin + columns)[None, :]
    mask = (tokens >= 0)[:, None] & (columns < size)[None, :]
    if behind:
        if early:
            gdc_wait()
        base = tl.load(there, mask=mask, other=0.0)
    else:
        base = tl.load(there, mask=mask, other=0.0)
        if early:
            gdc_wait()
    total = tl.zeros((block_m, rank), tl.float32)
    for split in tl.static_range(splits):
        place = inner + split * inner_split + tokens.to(tl.int64)[:, None] * inner_token + first + ranks[None, :]
        total += tl.load(place, mask=(tokens >= 0)[:, None], other=0.0).to(tl.float32)
    share = tl.dot((total * scale).to(weights.dtype), weights, input_precision=precision)
    tl.store(there, (base.to(tl.float32) + share).to(out.dtype.element_ty), mask=mask)
