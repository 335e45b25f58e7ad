"""Triton kernel that adds tensors over memory that all ranks read."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_peers(
    x,
    out,
    buffers,
    epochs,
    n,
    capacity,
    signals,
    own_rank: tl.constexpr,
    ranks: tl.constexpr,
    width: tl.constexpr,
):
    """Add n numbers of all ranks.

    `buffers` has the address of each rank's memory, in which the words of the blocks lie behind `signals` bytes.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + block)
    kind: tl.constexpr = tl.pointer_type(x.dtype.element_ty)
    copy = (epoch & 1).to(tl.int64) * capacity
    mine = tl.load(buffers + own_rank)
    piece = tl.cdiv(tl.cdiv(n, blocks), width) * width
    start = block * piece
    end = min(start + piece, n)
    own = tl.multiple_of(mine.to(kind) + copy, 16)
    for first in range(start, end, width):
        at = first + tl.arange(0, width)
        tl.store(own + at, tl.load(x + at, mask=at < n), mask=at < n)
    tl.debug_barrier()
    for peer in tl.static_range(ranks):
        if peer != own_rank:
            word = (tl.load(buffers + peer) + signals).to(tl.pointer_type(tl.int32)) + own_rank * blocks + block
            tl.atomic_xchg(word, epoch + 1, sem="release", scope="sys")
    for peer in tl.static_range(ranks):
        if peer != own_rank:
            word = (mine + signals).to(tl.pointer_type(tl.int32)) + peer * blocks + block
            while tl.atomic_add(word, 0, sem="acquire", scope="sys") - epoch < 1:
                pass
    tl.debug_barrier()
    for first in range(start, end, width):
        at = first + tl.arange(0, width)
        total = tl.zeros((width,), tl.float32)
        for peer in tl.static_range(ranks):
            theirs = tl.multiple_of(tl.load(buffers + peer).to(kind) + copy, 16)
            total += tl.load(theirs + at, mask=at < n, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out + at, total.to(x.dtype.element_ty), mask=at < n)
    tl.store(epochs + block, epoch + 1)
