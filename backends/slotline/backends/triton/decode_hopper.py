"""Attention of single query tokens over a paged cache, on Hopper in Gluon: persistent warps with prefetched keys.

The same work as `kernels.attend` for requests with one token each. A program is one warp. It takes a request and a KV
head, and takes the next piece as soon as it has requested the last keys, so that tiles are also loaded between pieces.
A counter gives the next piece, so a program that waits longer for the memory takes fewer pieces.

Scores are keys times queries [keys, rows], and outputs are values times probabilities [size, rows]. The matrix units
work on 16 by 8, and a KV head has only a few queries, so most of 16 rows would be empty. This, and the absence of other
warps to wait for, saves energy, which limits a card's speed. docs/performance.md has the measurements.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch

from slotline.backends.triton.kernels import LOG2E
from slotline.kernels.gluon_compat import async_copy, gdc_launch_dependents, gdc_wait, gl, gluon, load_rows, mma_v2
from slotline.kernels.gluon_support import HopperLaunch
from slotline.kernels.triton_launcher import Launcher
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, LayerCache

TILE, STAGES, RESIDENT = 32, 3, 4
"""Keys of a tile, tiles of keys and of values that have a place, and programs that a multiprocessor holds."""
SIZES, MOST_GROUP = (64, 128), 8
"""Sizes of a head, and most query heads of a KV head."""
LOADS = ((2.9, 4.0), (7.7, float("inf")))
"""How many requests times KV heads each multiprocessor has where this kernel takes less time than the one for all:
where nearly all of them begin at once, or nearly two or more follow each other in each place."""
AHEAD = gl.constexpr(3)
"""Tiles after which a program asks what it is to do next: by then the first ones are on their way."""


@gluon.jit
def _next(counter, total):
    """Return the number of the next piece of work, -1 for none. The last program to get -1 resets the counter to 0."""
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == total - 1:
        gl.store(counter, 0)
    number = gl.num_programs(0) + taken
    return gl.where(number < total, number, -1)


@gluon.jit
def _work(number, seq_lens, starts, kv_heads):
    """Return request, KV head, query token and keys of a piece of work.

    No keys if the request has no token, or for -1.
    """
    request = gl.maximum(number, 0) // kv_heads
    token = gl.load(starts + request)
    length = gl.where(gl.load(starts + request + 1) > token, gl.load(seq_lens + request), 0)
    return request, gl.maximum(number, 0) % kv_heads, token, length


@gluon.jit
def _seek(
    number, counter, total, seq_lens, starts, kv_heads, out, o_token, o_head, lse, lse_head, group: gl.constexpr,
    rows: gl.constexpr, size: gl.constexpr, wide: gl.constexpr,
):  # fmt: skip
    """Return the first piece of work with keys from `number` on, with its number, in the form of `_work`.

    Skipped tokens without keys, which pad captured steps, get zeros and a logarithm of minus infinity.
    """
    request, head, token, length = _work(number, seq_lens, starts, kv_heads)
    while (number >= 0) & (length == 0):
        row = gl.arange(0, rows, layout=gl.SliceLayout(1, wide))
        column = gl.arange(0, size, layout=gl.SliceLayout(0, wide))
        has_token = (row < group) & (gl.load(starts + request + 1) > token)
        at = out + token.to(gl.int64) * o_token + head * group * o_head
        zeros = gl.zeros([rows, size], out.dtype.element_ty, layout=wide)
        gl.store(at + (row[:, None] * o_head + column[None, :]), zeros, mask=has_token[:, None])
        nothing = gl.full([rows], -float("inf"), gl.float32, layout=gl.SliceLayout(1, wide))
        gl.store(lse + token + (head.to(gl.int64) * group + row) * lse_head, nothing, mask=has_token)
        number = _next(counter, total)
        request, head, token, length = _work(number, seq_lens, starts, kv_heads)
    return number, request, head, token, length


@gluon.jit
def _blocks(table, number, length, page: gl.constexpr, tile: gl.constexpr, layout: gl.constexpr):
    """Return the blocks of a tile's keys. Blocks after the last key repeat that key's block."""
    pieces: gl.constexpr = tile // page if page < tile else 1
    piece = gl.arange(0, pieces, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    return gl.load(table + gl.minimum((number * tile + piece * page) // page, (length - 1) // page))


@gluon.jit
def _fetch(
    states, tiles, place, blocks, number, block, token, page: gl.constexpr, tile: gl.constexpr, layout: gl.constexpr
):
    """Start loading a tile of keys or values of a head. After the last key the rest of its block is loaded."""
    piece: gl.constexpr = page if page < tile else tile
    size: gl.constexpr = tiles.shape[3]
    row = gl.arange(0, piece, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    column = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    first = blocks.to(gl.int64) * block + number * tile % page * token
    load_rows(tiles.index(place), states + first[:, None, None] + (row * token + column))


@gluon.jit(do_not_specialize=["total", "lse_head"])
def attend_decodes(
    query,
    keys,
    values,
    out,
    lse,
    table,
    seq_lens,
    starts,
    counter,
    total,
    kv_heads,
    scale,
    q_token,
    q_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    o_token,
    o_head,
    lse_head,
    table_row,
    group: gl.constexpr,
    size: gl.constexpr,
    page: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
    early: gl.constexpr,
):
    """Compute attention of requests with one query token each, or none. Their KV heads are the `total` pieces of work.

    Any number of programs of one warp, at most one per piece. `counter`, an int32 of 0, is 0 again after the launch.
    Results go to out [tokens, heads, size] and lse [heads, tokens]. `scale` is for base 2. `early`: the next kernel may
    start, and this one waits for the previous.
    """
    if early:
        gdc_launch_dependents()
        gdc_wait()
    dtype: gl.constexpr = keys.dtype.element_ty
    rows: gl.constexpr = 8
    piece: gl.constexpr = page if page < tile else tile
    pieces: gl.constexpr = tile // piece
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // size, size // 8], [1, 1], [1, 0])
    deep: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // size, size // 8], [1, 1, 1], [2, 1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(0, mma)
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    in_pieces: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    key_pieces = gl.allocate_shared_memory(dtype, [stages, pieces, piece, size], in_pieces)
    value_pieces = gl.allocate_shared_memory(dtype, [stages, pieces, piece, size], in_pieces)
    queries = gl.allocate_shared_memory(dtype, [stages, rows, size], shared)

    head_row = gl.arange(0, rows, layout=gl.SliceLayout(1, wide))
    column = gl.arange(0, size, layout=gl.SliceLayout(0, wide))
    head_of = gl.arange(0, rows, layout=by_row)
    key_of_score = gl.arange(0, tile, layout=gl.SliceLayout(1, mma))
    key_of_value = gl.arange(0, tile, layout=gl.SliceLayout(0, left))

    # Requested loads: a piece of work, its next tile, and the next piece.
    asked, request, head, token, asked_length = _seek(
        gl.program_id(0), counter, total, seq_lens, starts, kv_heads, out, o_token, o_head, lse, lse_head, group, rows,
        size, wide,
    )  # fmt: skip
    asked_tile = 0
    blocks = _blocks(table + request.to(gl.int64) * table_row, 0, asked_length, page, tile, deep)
    behind, behind_request, behind_head, behind_token, behind_length = asked, request, head, token, asked_length
    # What is worked on, and what the tiles on their way belong to.
    current, soon, later = -1, -1, -1
    number, length = 0, 0
    out_at = out
    lse_at = lse
    q = gl.zeros([size, rows], dtype, layout=right)
    top = gl.full([rows], -float("inf"), gl.float32, layout=by_row)
    norm = gl.zeros([tile, rows], gl.float32, layout=mma)  # of each key's place in a tile
    acc = gl.zeros([size, rows], gl.float32, layout=mma)
    turn, to_fill, to_use = 0, 0, 0
    while (turn < stages - 1) | (soon >= 0):
        filled = asked
        if asked >= 0:
            if asked_tile == 0:
                q_at = query + token.to(gl.int64) * q_token + head * group * q_head
                q_mask = (head_row < group)[:, None]
                load_rows(queries.index(to_fill), q_at + (head_row[:, None] * q_head + column[None, :]), mask=q_mask)
            _fetch(keys + head * k_head, key_pieces, to_fill, blocks, asked_tile, k_block, k_token, page, tile, deep)
            _fetch(
                values + head * v_head, value_pieces, to_fill, blocks, asked_tile, v_block, v_token, page, tile, deep
            )
            asked_tile += 1
            tiles = (asked_length + (tile - 1)) // tile
            if asked_tile == gl.minimum(AHEAD, tiles):
                behind, behind_request, behind_head, behind_token, behind_length = _seek(
                    _next(counter, total), counter, total, seq_lens, starts, kv_heads, out, o_token, o_head, lse,
                    lse_head, group, rows, size, wide,
                )  # fmt: skip
            if asked_tile == tiles:
                asked, request, head, token, asked_length = (
                    behind,
                    behind_request,
                    behind_head,
                    behind_token,
                    behind_length,
                )
                asked_tile = 0
            if asked >= 0:
                blocks = _blocks(table + request.to(gl.int64) * table_row, asked_tile, asked_length, page, tile, deep)
        async_copy.commit_group()
        to_fill += 1
        if to_fill == stages:
            to_fill = 0

        if soon >= 0:
            async_copy.wait_group(stages - 1)
            if soon != current:
                current = soon
                _, now_head, now_token, length = _work(current, seq_lens, starts, kv_heads)
                number = 0
                out_at = out + now_token.to(gl.int64) * o_token + now_head * group * o_head
                lse_at = lse + now_token + now_head.to(gl.int64) * group * lse_head
                q = queries.index(to_use).permute((1, 0)).load(right)
                top = gl.full([rows], -float("inf"), gl.float32, layout=by_row)
                norm = gl.zeros([tile, rows], gl.float32, layout=mma)
                acc = gl.zeros([size, rows], gl.float32, layout=mma)
            k = key_pieces.index(to_use).reshape([tile, size]).load(left)
            scores = mma_v2(k, q, gl.zeros([tile, rows], gl.float32, layout=mma))
            v = value_pieces.index(to_use).reshape([tile, size]).permute((1, 0)).load(left)
            rest = length - number * tile
            if rest < tile:
                scores = gl.where((key_of_score < rest)[:, None], scores, -float("inf"))
                v = gl.where((key_of_value < rest)[None, :], v, 0.0)
            best = gl.maximum(top, gl.max(scores, 0) * scale)
            weights = gl.exp2(scores * scale - best[None, :])
            shrink = gl.exp2(top - best)
            norm = norm * shrink[None, :] + weights
            top = best
            acc = mma_v2(v, gl.convert_layout(weights.to(dtype), right), acc * shrink[None, :])
            number += 1
            if rest <= tile:
                total_norm = gl.sum(norm, 0)
                result = queries.index(to_use)  # its queries have been read
                result.permute((1, 0)).store((acc / total_norm[None, :]).to(dtype))
                at = out_at + (head_row[:, None] * o_head + column[None, :])
                gl.store(at, result.load(wide), mask=(head_row < group)[:, None])
                lse_mask = head_of < group
                gl.store(lse_at + head_of * lse_head, (top + gl.log2(total_norm)) * 0.6931471805599453, mask=lse_mask)
            to_use += 1
            if to_use == stages:
                to_use = 0
        soon, later = later, filled
        turn += 1


class HopperDecodes:
    """Launches the kernel for the layers of a group.

    Args:
        context: of the group.
        cores: the device's multiprocessors.
    """

    def __init__(self, context: AttentionContext, cores: int) -> None:
        layer = context.layers[0]
        self._group, self._page, self._cores = layer.num_heads // layer.num_kv_heads, context.kernel_block_size, cores
        self._kv_heads = layer.num_kv_heads
        self._launch = HopperLaunch("single tokens", Launcher(attend_decodes))
        self._counter = torch.zeros(1, dtype=torch.int32, device=context.device)

    @staticmethod
    def serves(context: AttentionContext) -> bool:
        """Return True if the kernel supports a group's layers, and batch invariance is not required."""
        layer = context.layers[0]
        fits = layer.head_size == layer.head_size_v and layer.head_size in SIZES
        fits &= layer.num_heads // layer.num_kv_heads <= MOST_GROUP
        plain = layer.window is None and layer.soft_cap is None and layer.alibi_slopes is None and not layer.sinks
        plain &= context.dtype == context.kv_dtype and context.dtype in ("bfloat16", "float16")
        page = context.kernel_block_size
        whole = page % 8 == 0 and max(page, TILE) % min(page, TILE) == 0
        return fits and plain and whole and not context.batch_invariant

    def takes(self, requests: int) -> bool:
        """Return True if this number of requests is faster than with the common kernel."""
        load = requests * self._kv_heads / self._cores
        return any(low <= load <= high for low, high in LOADS)

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        requests: int,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> bool:
        """Compute attention of the batch's first requests, which have one query token each.

        Results go to `out` [num_tokens, heads, size] and `lse` [heads, num_tokens]. Return False and do nothing if rows
        of queries, keys or values are not at multiples of 32 bytes, or Triton cannot compile the kernel.
        """
        if not all(map(_lies_even, (query, cache.key, cache.value))):
            return False
        work, early = requests * self._kv_heads, query.is_cuda
        return self._launch(
            (min(RESIDENT * self._cores, work),),
            query,
            cache.key,
            cache.value,
            out,
            lse,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            self._counter,
            work,
            self._kv_heads,
            layer.scale * LOG2E,
            query.stride(0),
            query.stride(1),
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            batch.block_table.stride(0),
            self._group,
            layer.head_size,
            self._page,
            TILE,
            STAGES,
            early,
            num_warps=1,
            **({"launch_pdl": True} if early else {}),
        )


def _lies_even(tensor: torch.Tensor) -> bool:
    """Return True if rows are contiguous and aligned to 16 bytes, which Triton derives from strides."""
    *strides, last = tensor.stride()
    return tensor.data_ptr() % 16 == 0 and last == 1 and not any(stride % 16 for stride in strides)
