"""Attention of prompts that begin in a step, on Hopper in Gluon: one warp loads tiles while two warp groups compute.

The same work as `prompt_kernels.attend_prompts`, in the form of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).
A block has 128 rows, 64 for each warp group. The groups share two buffers for tiles of 128 keys and two for values.
Programs are persistent and take the next block when they are done, the last block of a prompt first. Its queries are
loaded, and its first scores computed, while the previous block is finished.

Keys of a block are read from the last tile to the first, so that the one tile with a mask is the first.
"""

# mypy: ignore-errors

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from slotline.backends.triton.kernels import LOG2E, _find_request
from slotline.kernels.gluon_compat import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    load_box,
    mbarrier,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slotline.kernels.gluon_support import HopperLaunch
from slotline.kernels.triton_launcher import Boxes, Launcher
from slotline.registry.contracts.attention import AttentionBatch, AttentionLayer

if TYPE_CHECKING:
    from slotline.backends.triton.backend import Launch

ROWS, TILE, SIZE = 128, 128, 128
"""Rows of a block, keys of a tile, and the size of heads that the kernel has been measured to be faster for."""
SHORT = 128
"""Tokens that prompts have on average at least: blocks of fewer are mostly empty."""


@gluon.jit
def _place(number, starts, first, num_requests, blocks, kv_heads, block_q: gl.constexpr):
    """Return KV head, first token and length of the prompt, and block of a piece of work."""
    rank = gl.minimum(number // kv_heads, blocks - 1)  # numbers after the last are skipped
    request, block = _find_request(blocks - 1 - rank, starts, first, num_requests, block_q)
    begin = gl.load(starts + request)
    return number % kv_heads, begin, gl.load(starts + request + 1) - begin, block


@gluon.jit
def _fetch(boxes, places, full, empty, step, at, column, tile: gl.constexpr, size: gl.constexpr):
    """Load a tile of keys or values into its buffer, once the old contents are not needed any more."""
    place = step % 2
    mbarrier.wait(empty.index(place), ((step // 2) & 1) ^ 1)
    mbarrier.expect(full.index(place), tile * size * 2)
    load_box(boxes, [at, column], full.index(place), places.index(place))


@gluon.jit
def _load(
    query_boxes,
    key_boxes,
    value_boxes,
    queries,
    items,
    keys,
    values,
    full_q,
    empty_q,
    full_k,
    empty_k,
    full_v,
    empty_v,
    starts,
    counter,
    first,
    num_requests,
    blocks,
    kv_heads,
    group: gl.constexpr,
    half_q: gl.constexpr,
    tile: gl.constexpr,
    size: gl.constexpr,
):
    """Run the loading warp: load a block's queries, then the keys of each tile before the values of the previous one.

    The next block is looked up after the first keys, so that nothing waits for it. The computing warps get a block from
    `items`. A length of 0 is the end.
    """
    block_q: gl.constexpr = 2 * half_q
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    column = gl.arange(0, 4, layout=lane)
    step, count, late, late_column = 0, 0, 0, 0
    total = blocks * kv_heads
    number = gl.program_id(0)
    head, begin, length, block = _place(number, starts, first, num_requests, blocks, kv_heads, block_q)
    while number < total:
        tiles, at = 0, begin
        if block * block_q < length:
            side = count % 2
            mbarrier.wait(empty_q.index(side), ((count // 2) & 1) ^ 1)
            item = gl.where(column == 0, head, gl.where(column == 1, begin, gl.where(column == 2, length, block)))
            items.index(side).store(item)
            thread_barrier()
            mbarrier.expect(full_q.index(side), block_q * group * size * 2)
            for half in gl.static_range(2):
                where = [begin + block * block_q + half * half_q, head * group, 0]
                load_box(query_boxes, where, full_q.index(side), queries.index(side * 2 + half))
            count += 1
            tiles = gl.cdiv(gl.minimum(length, (block + 1) * block_q), tile)
            at = begin + (tiles - 1) * tile
            _fetch(key_boxes, keys, full_k, empty_k, step, at, head * size, tile, size)
            if step > 0:  # the last values of the block before
                _fetch(value_boxes, values, full_v, empty_v, step - 1, late, late_column, tile, size)
            late, late_column = at, head * size
            step += 1
        here = head * size
        asked = gl.atomic_add(counter, 1, sem="relaxed")
        if asked == total - 1:  # no further requests: ready for the next launch
            gl.store(counter, 0)
        number = gl.num_programs(0) + asked
        head, begin, length, block = _place(number, starts, first, num_requests, blocks, kv_heads, block_q)
        for _ in range(1, tiles):
            at -= tile
            _fetch(key_boxes, keys, full_k, empty_k, step, at, here, tile, size)
            _fetch(value_boxes, values, full_v, empty_v, step - 1, late, here, tile, size)
            late = at
            step += 1
    if step > 0:
        _fetch(value_boxes, values, full_v, empty_v, step - 1, late, late_column, tile, size)
    side = count % 2
    mbarrier.wait(empty_q.index(side), ((count // 2) & 1) ^ 1)
    items.index(side).store(gl.zeros([4], gl.int32, layout=lane))
    thread_barrier()
    mbarrier.arrive(full_q.index(side), count=1)


@gluon.jit
def _item(items, full_q, count):
    """Return the block of a count, once its queries are loaded: KV head, first token, prompt length, block."""
    side = count % 2
    mbarrier.wait(full_q.index(side), (count // 2) & 1)
    each: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    column = gl.arange(0, 4, layout=each)
    found = items.index(side).load(each)
    head = gl.sum(gl.where(column == 0, found, 0), 0)
    begin = gl.sum(gl.where(column == 1, found, 0), 0)
    length = gl.sum(gl.where(column == 2, found, 0), 0)
    block = gl.sum(gl.where(column == 3, found, 0), 0)
    return head, begin, length, block


@gluon.jit
def _begin(scores, start, token, scale, layout: gl.constexpr, tile: gl.constexpr):
    """Return weights, maxima and sums of a block's first tile. Rows after the prompt may see no key at all."""
    at = start + gl.arange(0, tile, layout=gl.SliceLayout(0, layout))
    scores = gl.where(at[None, :] <= token[:, None], scores, -float("inf"))
    top = gl.max(scores, 1) * scale
    safe = gl.where(top == -float("inf"), 0.0, top)
    weights = gl.exp2(scores * scale - safe[:, None])
    return weights, top, gl.sum(weights, 1)


@gluon.jit
def _next(
    q,
    keys,
    values,
    full_k,
    empty_k,
    full_v,
    empty_v,
    held,
    acc,
    top,
    norm,
    step,
    scale,
    tile: gl.constexpr,
    s_layout: gl.constexpr,
    o_layout: gl.constexpr,
    dtype: gl.constexpr,
):
    """Compute the scores of a tile that all rows see.

    Meanwhile the previous tile's weights are multiplied with its values.
    """
    place, phase = step % 2, (step // 2) & 1
    old, old_phase = (step - 1) % 2, ((step - 1) // 2) & 1
    mbarrier.wait(full_k.index(place), phase)
    nothing = gl.zeros([64, tile], gl.float32, layout=s_layout)
    ahead = warpgroup_mma(q, keys.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(full_v.index(old), old_phase)
    flying = warpgroup_mma(held, values.index(old), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[ahead])
    thread_barrier()
    mbarrier.arrive(empty_k.index(place), count=1)
    best = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - best[:, None])
    shrink = gl.exp2(top - best)
    norm = norm * shrink + gl.sum(weights, 1)
    acc, weights = warpgroup_mma_wait(0, deps=[flying, weights])
    thread_barrier()
    mbarrier.arrive(empty_v.index(old), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    held = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
    return held, acc, best, norm


@gluon.jit
def _clear(values, full_v, step, left, tile: gl.constexpr, plain: gl.constexpr, dtype: gl.constexpr):
    """Write zeros after the prompt, where any values may be, since zero times NaN is NaN. `left` rows are real."""
    place = step % 2
    mbarrier.wait(full_v.index(place), (step // 2) & 1)
    real = gl.arange(0, tile, layout=gl.SliceLayout(1, plain)) < left
    kept = values.index(place).load(plain)
    values.index(place).store(gl.where(real[:, None], kept, 0.0).to(dtype))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _compute(
    queries,
    items,
    keys,
    values,
    full_q,
    empty_q,
    full_k,
    empty_k,
    full_v,
    empty_v,
    out,
    lse,
    scale,
    o_token,
    o_head,
    lse_head,
    which: gl.constexpr,
    group: gl.constexpr,
    half_q: gl.constexpr,
    tile: gl.constexpr,
    size: gl.constexpr,
):
    """Run a warp group, which computes half `which` of the rows of one block after the other."""
    dtype: gl.constexpr = keys.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16])
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [256 // size, size // 8], [4, 1], [1, 0])
    block_q: gl.constexpr = 2 * half_q
    dim = gl.arange(0, size, layout=gl.SliceLayout(0, plain))
    o_row = gl.arange(0, 64, layout=gl.SliceLayout(1, plain))
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    nothing = gl.zeros([64, tile], gl.float32, layout=s_layout)
    step, count = 0, 0
    head, begin, length, block = _item(items, full_q, 0)
    mbarrier.wait(full_k.index(0), 0, pred=length > 0)
    tiles = gl.cdiv(gl.minimum(length, (block + 1) * block_q), tile)
    q = queries.index(which).reshape([64, size])
    ahead = warpgroup_mma(q, keys.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[ahead])
    thread_barrier()
    mbarrier.arrive(empty_k.index(0), count=1, pred=length > 0)
    token = block * block_q + which * half_q + row // group
    weights, top, norm = _begin(scores, (tiles - 1) * tile, token, scale, s_layout, tile)
    held = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
    acc = gl.zeros([64, size], gl.float32, layout=o_layout)
    if tiles * tile > length:
        _clear(values, full_v, 0, length - (tiles - 1) * tile, tile, plain, dtype)
    while length > 0:
        side = count % 2
        q = queries.index(side * 2 + which).reshape([64, size])
        mine = block * block_q + which * half_q
        token = mine + row // group
        for back in range(1, tiles):
            # fmt: off
            held, acc, top, norm = _next(q, keys, values, full_k, empty_k, full_v, empty_v, held, acc, top, norm,
                                         step + back, scale, tile, s_layout, o_layout, dtype)
            # fmt: on
        step += tiles
        count += 1
        # The first scores of the next block overlap the last product of this one.
        next_head, next_begin, next_length, next_block = _item(items, full_q, count)
        more = next_length > 0
        place, phase = step % 2, (step // 2) & 1
        old, old_phase = (step - 1) % 2, ((step - 1) // 2) & 1
        mbarrier.wait(full_k.index(place), phase, pred=more)
        next_q = queries.index((count % 2) * 2 + which).reshape([64, size])
        ahead = warpgroup_mma(next_q, keys.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(full_v.index(old), old_phase)
        flying = warpgroup_mma(held, values.index(old), acc, is_async=True)
        tiles = gl.cdiv(gl.minimum(next_length, (next_block + 1) * block_q), tile)
        scores = warpgroup_mma_wait(1, deps=[ahead])
        thread_barrier()
        mbarrier.arrive(empty_k.index(place), count=1, pred=more)
        next_token = next_block * block_q + which * half_q + row // group
        weights, next_top, next_norm = _begin(scores, (tiles - 1) * tile, next_token, scale, s_layout, tile)
        acc, weights = warpgroup_mma_wait(0, deps=[flying, weights])
        thread_barrier()
        mbarrier.arrive(empty_v.index(old), count=1)
        held = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
        lse_at = lse + (head * group + row % group).to(gl.int64) * lse_head + begin + token
        gl.store(lse_at, (top + gl.log2(norm)) * 0.6931471805599453, mask=token < length)
        inverse = gl.convert_layout(1.0 / norm, gl.SliceLayout(1, o_layout))
        q.store((acc * inverse[:, None]).to(dtype))  # the queries are no longer needed: their place turns the rows
        fence_async_shared()
        thread_barrier()
        rows = q.load(plain)
        thread_barrier()
        mbarrier.arrive(empty_q.index(side), count=1)
        o_token_at = mine + o_row // group
        o_at = out + (begin + o_token_at).to(gl.int64) * o_token + (head * group + o_row % group) * o_head
        gl.store(o_at[:, None] + dim[None, :], rows, mask=(o_token_at < length)[:, None])
        head, begin, length, block, top, norm = next_head, next_begin, next_length, next_block, next_top, next_norm
        acc = gl.zeros([64, size], gl.float32, layout=o_layout)
        if tiles * tile > length:
            _clear(values, full_v, step, length - (tiles - 1) * tile, tile, plain, dtype)


@gluon.jit(do_not_specialize=["first", "num_requests", "blocks", "kv_heads", "lse_head"])
def attend_prompts(
    query_boxes,
    key_boxes,
    value_boxes,
    out,
    lse,
    starts,
    counter,
    first,
    num_requests,
    blocks,
    kv_heads,
    scale,
    o_token,
    o_head,
    lse_head,
    group: gl.constexpr,
    size: gl.constexpr,
    tile: gl.constexpr,
):
    """Compute `prompt_kernels.attend_prompts` for all blocks, with any number of programs up to the number of blocks.

    Boxes of queries are [64 / group, group, size] out of [tokens, heads, size], those of keys and values [tile, size]
    out of [tokens, KV heads * size]. `counter`, an int32 of 0, is 0 again after the launch.
    """
    dtype: gl.constexpr = key_boxes.dtype
    half_q: gl.constexpr = 64 // group
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    queries = gl.allocate_shared_memory(dtype, [4, half_q, group, size], query_boxes.layout)
    keys = gl.allocate_shared_memory(dtype, [2, tile, size], layout)
    values = gl.allocate_shared_memory(dtype, [2, tile, size], layout)
    items = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full_q = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty_q = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full_k = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        for there in gl.static_range(3):
            ready = full_q if there == 0 else full_k if there == 1 else full_v
            free = empty_q if there == 0 else empty_k if there == 1 else empty_v
            mbarrier.init(ready.index(place), count=1)
            mbarrier.init(free.index(place), count=2)
    fence_async_shared()
    thread_barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (_compute, (queries, items, keys, values, full_q, empty_q, full_k, empty_k, full_v, empty_v,
                        out, lse, scale, o_token, o_head, lse_head, 0, group, half_q, tile, size)),
            (_compute, (queries, items, keys, values, full_q, empty_q, full_k, empty_k, full_v, empty_v,
                        out, lse, scale, o_token, o_head, lse_head, 1, group, half_q, tile, size)),
            (_load, (query_boxes, key_boxes, value_boxes,
                     queries, items, keys, values, full_q, empty_q, full_k, empty_k, full_v, empty_v,
                     starts, counter, first, num_requests, blocks, kv_heads, group, half_q, tile, size)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on


class HopperPrompts:
    """Launcher of the kernel for layers of equal needs.

    Args:
        group: query heads of a KV head, a power of two up to 64. Heads have `SIZE` numbers.
        device: torch device string.
        cores: its multiprocessors.
    """

    def __init__(self, group: int, device: str, cores: int) -> None:
        self._group, self._cores = group, cores
        self._launch = HopperLaunch("prompts", Launcher(attend_prompts))
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        rows, layer = (gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 3))
        self._boxes = Boxes((TILE, SIZE), partial(TensorDescriptor, layout=rows))
        self._query_boxes = Boxes((ROWS // 2 // group, group, SIZE), partial(TensorDescriptor, layout=layer))

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: AttentionBatch,
        launch: Launch,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> bool:
        """Do the work of `PromptAttention.forward`.

        Return False and do nothing if prompts are short, the copy engine cannot read the queries, or Triton cannot
        compile the kernel.
        """
        prompts = launch.end - launch.first
        boxed = query.data_ptr() % 16 == 0 and all(n > 0 and n % 8 == 0 for n in query.stride()[:2])
        if launch.tokens < SHORT * prompts or not boxed:
            return False
        blocks, kv_heads = launch.tokens * self._group // ROWS + prompts, layer.num_kv_heads
        return self._launch(
            (min(self._cores, blocks * kv_heads),),
            self._query_boxes(query, tuple(query.shape), query.stride()),
            *(self._boxes(t, (t.shape[0], kv_heads * SIZE), (t.stride(0), 1)) for t in (key, value)),
            out,
            lse,
            batch.query_start_loc,
            self._counter,
            launch.first,
            launch.end,
            blocks,
            kv_heads,
            layer.scale * LOG2E,
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            self._group,
            SIZE,
            TILE,
            num_warps=4,
        )
