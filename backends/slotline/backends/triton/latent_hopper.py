"""Multi-head latent attention on Hopper in Gluon: one warp loads tiles of latents while two warp groups compute.

The same work as `latent_kernels.attend_latents`, for latents of 512 and 64 numbers and 64 rows a program. Two tiles of
64 latents and the queries fill the shared memory, so a tile's buffer is reused as soon as the last products over it are
done, in halves. The products of probabilities with the right half of one tile run while the softmax of the next is
computed. Those with the left half run before, so that its buffer is free early.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 - the compiler knows tuples that are joined, not such that are unpacked

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slotline.backends.triton.kernels import LOG2E
from slotline.backends.triton.latent_kernels import _find_request
from slotline.kernels.gluon_compat import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    load_box,
    mbarrier,
    reinterpret,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from slotline.kernels.gluon_support import HopperLaunch
from slotline.registry.contracts.attention import AttentionBatch, AttentionLayer, KVCache

if TYPE_CHECKING:
    from slotline.backends.triton.latents import Launch


@gluon.jit
def _copy(half, narrow, rows, column, ready, target, page: gl.constexpr):
    """Copy half of a tile, from the rows of one block, or of several blocks of less than 64."""
    if page >= 64:
        load_box(half, [rows[0], column], ready, target)
    else:
        pieces = reinterpret(target, [256 // page, page, 64], narrow)
        for part in gl.static_range(64 // page):
            for quarter in gl.static_range(4):
                piece = pieces.index(quarter * (64 // page) + part)
                load_box(narrow, [rows[part], column + quarter * 64], ready, piece)


@gluon.jit
def _load(
    half, narrow, table, first_tile, last_tile, end, per_block, left, right, ropes, full, empty, page: gl.constexpr
):
    """Run the loading warp: load halves of tiles alternately into two buffers, each after the previous products."""
    for number in range(first_tile, last_tile):
        step = number - first_tile
        place = step % 2
        phase = ((step // 2) & 1) ^ 1
        rows = ()
        if page >= 64:
            rows = rows + (gl.load(table + number * 64 // page) * per_block + number * 64 % page,)
        else:
            for part in gl.static_range(64 // page):
                block = gl.minimum(number * (64 // page) + part, (end - 1) // page)  # what is twice there is masked
                rows = rows + (gl.load(table + block) * per_block,)
        mbarrier.wait(empty.index(place), phase)
        ready = full.index(place)
        mbarrier.expect(ready, 64 * 320 * 2)
        _copy(half, narrow, rows, 0, ready, left.index(place), page)
        if page >= 64:
            load_box(narrow, [rows[0], 512], ready, ropes.index(place))
        else:
            pieces = reinterpret(ropes.index(place), [64 // page, page, 64], narrow)
            for part in gl.static_range(64 // page):
                load_box(narrow, [rows[part], 512], ready, pieces.index(part))
        mbarrier.wait(empty.index(place + 2), phase)
        ready = full.index(place + 2)
        mbarrier.expect(ready, 64 * 256 * 2)
        _copy(half, narrow, rows, 256, ready, right.index(place), page)


@gluon.jit
def _weigh(scores, top, total, number, end, position, scale, masked: gl.constexpr, score_layout: gl.constexpr):
    """Return the unnormalised probabilities of one tile, the new maximum and sums, and the factor of the old ones."""
    if masked:
        key = number * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, score_layout))
        seen = (key < end)[None, :] & (key[None, :] <= position[:, None])
        scores = gl.where(seen, scores, -float("inf"))
    best = gl.maximum(top, gl.max(scores, 1) * scale)
    safe = best
    if masked:
        safe = gl.where(best == -float("inf"), 0.0, best)  # a row that has seen nothing yet
    weights = gl.exp2(scores * scale - safe[:, None])
    shrink = gl.exp2(top - safe)
    return weights, best, total * shrink[:, None] + weights, shrink


@gluon.jit
def _clear(latents, real_rows, layout: gl.constexpr):
    """Write zeros after the last key, where any values may be, since zero times NaN is NaN."""
    real = gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) < real_rows
    for part in gl.static_range(4):
        piece = latents.slice(part * 64, 64, dim=1)
        kept = piece.load(layout)
        piece.store(gl.where(real[:, None], kept, 0.0).to(gl.bfloat16))


@gluon.jit
def _compute(
    q_left,
    q_right,
    q_rope,
    left,
    right,
    ropes,
    chances,
    full,
    empty,
    out,
    lse,
    parts,
    part_norms,
    begin,
    block,
    query_len,
    length,
    end,
    first_tile,
    last_tile,
    index,
    scale,
    o_token,
    o_head,
    lse_head,
    num_splits,
    heads: gl.constexpr,
    single: gl.constexpr,
    split: gl.constexpr,
):
    """Run the two warp groups. Each computes half of the keys' scores and half of the columns of each output half."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    row = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout))
    position = length - query_len + row // heads
    top = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, score_layout))
    total = gl.zeros([64, 64], gl.float32, layout=score_layout)
    acc_left = gl.zeros([64, 256], gl.float32, layout=out_layout)
    acc_right = gl.zeros([64, 256], gl.float32, layout=out_layout)
    nothing = gl.zeros([64, 64], gl.float32, layout=score_layout)
    if first_tile < last_tile:
        mbarrier.wait(full.index(0), 0)
        scores = warpgroup_mma(q_left, left.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_rope, ropes.index(0).permute((1, 0)), scores, is_async=True)
        mbarrier.wait(full.index(2), 0)
        scores = warpgroup_mma(q_right, right.index(0).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        flying = warpgroup_mma_init(acc_right)
        for number in range(first_tile, last_tile - 1):
            step = number - first_tile
            place = step % 2
            other = (step + 1) % 2
            phase = ((step + 1) // 2) & 1
            weights, top, total, shrink = _weigh(
                scores, top, total, number, end, position, scale, not single, score_layout
            )
            shrink = gl.convert_layout(shrink, gl.SliceLayout(1, out_layout))[:, None]
            acc_left = acc_left * shrink
            held_right = warpgroup_mma_wait(0, deps=[flying])
            thread_barrier()  # the other warp group may still read the tile, and the probabilities
            mbarrier.arrive(empty.index(other + 2), count=1, pred=step > 0)
            chances.store(weights.to(gl.bfloat16))
            fence_async_shared()
            held_right = held_right * shrink
            held = warpgroup_mma(chances, left.index(place), acc_left, is_async=True)
            mbarrier.wait(full.index(other), phase)
            ahead = warpgroup_mma(q_left, left.index(other).permute((1, 0)), nothing, use_acc=False, is_async=True)
            ahead = warpgroup_mma(q_rope, ropes.index(other).permute((1, 0)), ahead, is_async=True)
            acc_left = warpgroup_mma_wait(2, deps=[held])
            thread_barrier()
            mbarrier.arrive(empty.index(place), count=1)
            mbarrier.wait(full.index(other + 2), phase)
            ahead = warpgroup_mma(q_right, right.index(other).permute((1, 0)), ahead, is_async=True)
            flying = warpgroup_mma(chances, right.index(place), held_right, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[ahead])
        number = last_tile - 1
        place = (number - first_tile) % 2
        weights, top, total, shrink = _weigh(scores, top, total, number, end, position, scale, True, score_layout)
        acc_right = warpgroup_mma_wait(0, deps=[flying])
        thread_barrier()
        if last_tile * 64 > end:
            plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
            _clear(left.index(place), end - number * 64, plain)
            _clear(right.index(place), end - number * 64, plain)
        chances.store(weights.to(gl.bfloat16))
        fence_async_shared()
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, out_layout))[:, None]
        held = warpgroup_mma(chances, left.index(place), acc_left * shrink, is_async=True)
        flying = warpgroup_mma(chances, right.index(place), acc_right * shrink, is_async=True)
        acc_left = warpgroup_mma_wait(1, deps=[held])
        acc_right = warpgroup_mma_wait(0, deps=[flying])
    norm = gl.sum(total, 1)

    used = row // heads < query_len
    where = (begin + row // heads).to(gl.int64)
    o_row = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
    o_used = o_row // heads < query_len
    o_where = (begin + o_row // heads).to(gl.int64)
    dim = gl.arange(0, 256, layout=gl.SliceLayout(0, out_layout))
    if split:
        slot = (where * heads + row % heads) * num_splits + index
        gl.store(part_norms + slot * 2, top, mask=used)
        gl.store(part_norms + slot * 2 + 1, norm, mask=used)
        o_slot = (o_where * heads + o_row % heads) * num_splits + index
        o_parts = parts + o_slot[:, None] * 512 + dim[None, :]
        gl.store(o_parts, acc_left, mask=o_used[:, None])
        gl.store(o_parts + 256, acc_right, mask=o_used[:, None])
    else:
        o_norm = gl.convert_layout(norm, gl.SliceLayout(1, out_layout))
        o_norm = gl.where(o_norm == 0.0, 1.0, o_norm)[:, None]
        o_at = out + (o_where * o_token + (o_row % heads) * o_head)[:, None] + dim[None, :]
        gl.store(o_at, (acc_left / o_norm).to(gl.bfloat16), mask=o_used[:, None])
        gl.store(o_at + 256, (acc_right / o_norm).to(gl.bfloat16), mask=o_used[:, None])
        gl.store(
            lse + (row % heads).to(gl.int64) * lse_head + where,
            (top + gl.log2(norm)) * 0.6931471805599453,
            mask=used,
        )


@gluon.jit(do_not_specialize=["first", "num_requests", "lse_head", "num_splits"])
def attend_latents(
    query,
    half,
    narrow,
    out,
    lse,
    parts,
    part_norms,
    table,
    seq_lens,
    starts,
    first,
    num_requests,
    scale,
    q_token,
    q_head,
    per_block,
    o_token,
    o_head,
    lse_head,
    table_row,
    num_splits,
    heads: gl.constexpr,
    page: gl.constexpr,
    single: gl.constexpr,
    split: gl.constexpr,
):
    """Do the work of `latent_kernels.attend_latents`.

    `half` and `narrow` describe the cache's rows for halves of tiles' latents, and for 64 numbers of a tile or, where
    blocks have fewer than 64 tokens, of a block. A block's rows begin `per_block` after those of the previous block.
    """
    index = gl.program_id(1)
    if single:
        each: gl.constexpr = (heads + 63) // 64
        request, block = first + gl.program_id(0) // each, gl.program_id(0) % each
    else:
        # The last blocks of a prompt see most keys: they begin first, so that none is left over at the end.
        last = gl.num_programs(0) - 1
        request, block = _find_request(last - gl.program_id(0), starts, first, num_requests, heads, 64)
    begin = gl.load(starts + request)
    query_len = gl.load(starts + request + 1) - begin
    length = gl.load(seq_lens + request)
    if block * 64 >= query_len * heads:
        return
    end = gl.minimum(length, length - query_len + (block * 64 + 63) // heads + 1)
    first_tile, last_tile = 0, gl.cdiv(end, 64)
    if split:
        share = gl.cdiv(last_tile, num_splits)
        first_tile = index * share
        last_tile = gl.minimum(last_tile, first_tile + share)

    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], shared)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], shared)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared)
    left = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], shared)
    right = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], shared)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], shared)
    chances = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(4):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=1)

    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    row = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, plain))
    used = row // heads < query_len
    dim = gl.arange(0, 64, layout=gl.SliceLayout(0, plain))
    at = query + ((begin + row // heads).to(gl.int64) * q_token + (row % heads) * q_head)[:, None] + dim[None, :]
    for part in gl.static_range(4):
        q_left.slice(part * 64, 64, dim=1).store(gl.load(at + part * 64, mask=used[:, None], other=0.0))
        q_right.slice(part * 64, 64, dim=1).store(gl.load(at + 256 + part * 64, mask=used[:, None], other=0.0))
    q_rope.store(gl.load(at + 512, mask=used[:, None], other=0.0))
    fence_async_shared()
    thread_barrier()

    gl.warp_specialize(
        [
            (
                _compute,
                (
                    q_left,
                    q_right,
                    q_rope,
                    left,
                    right,
                    ropes,
                    chances,
                    full,
                    empty,
                    out,
                    lse,
                    parts,
                    part_norms,
                    begin,
                    block,
                    query_len,
                    length,
                    end,
                    first_tile,
                    last_tile,
                    index,
                    scale,
                    o_token,
                    o_head,
                    lse_head,
                    num_splits,
                    heads,
                    single,
                    split,
                ),
            ),
            (
                _load,
                (
                    half,
                    narrow,
                    table + request.to(gl.int64) * table_row,
                    first_tile,
                    last_tile,
                    end,
                    per_block,
                    left,
                    right,
                    ropes,
                    full,
                    empty,
                    page,
                ),
            ),
        ],
        [1],
        [24],
    )


class HopperLatents:
    """Launches the kernel for a group of layers whose blocks have `page` tokens: 16, 32 or a multiple of 64."""

    def __init__(self, page: int) -> None:
        self._page, self._launch = page, HopperLaunch("latents", _launch)
        self._rows: dict[int, tuple[TensorDescriptor, TensorDescriptor, int]] = {}  # of caches, by address

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        launch: Launch,
        out: torch.Tensor,
        lse: torch.Tensor,
        parts: torch.Tensor,
        norms: torch.Tensor,
    ) -> bool:
        """Do one launch of `TritonLatents`.

        Return False and do nothing if the copy engine cannot read the cache, or Triton cannot compile the kernel.
        """
        block, token = cache.key.stride()[:2]
        if block % token or token % 8 or cache.key.data_ptr() % 16:
            return False  # blocks do not lie a whole number of rows apart, as in a pool that groups share
        half, narrow, per_block = self._described(cache.key)
        return self._launch(
            (launch.blocks, launch.splits),
            query,
            half,
            narrow,
            out,
            lse,
            parts,
            norms,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            launch.first,
            launch.end,
            layer.scale * LOG2E,
            query.stride(0),
            query.stride(1),
            per_block,
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            batch.block_table.stride(0),
            launch.splits,
            heads=layer.num_heads,
            page=self._page,
            single=launch.single,
            split=launch.splits > 1,
            num_warps=8,
        )

    def _described(self, latents: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor, int]:
        """Return descriptors of a cache's rows for tiles of latents and of the rest, and the row distance of blocks."""
        if latents.data_ptr() not in self._rows:
            block, token = latents.stride()[:2]
            count = (latents.shape[0] - 1) * (block // token) + latents.shape[1]
            rows = latents.as_strided((count, latents.shape[3]), (token, 1))
            layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
            box = min(self._page, 64)
            half, narrow = (TensorDescriptor.from_tensor(rows, [box, width], layout) for width in (256, 64))
            self._rows[latents.data_ptr()] = half, narrow, block // token
        return self._rows[latents.data_ptr()]


def _launch(grid, *arguments, **options):
    """Launch the kernel: its arguments are of few kinds, and Triton's own look at them costs little beside its work."""
    attend_latents[grid](*arguments, **options)
