"""Attention of single query tokens in one launch: what is at its edges, the attention itself, and the join of splits.

A program handles the queries of one KV head of one request, and one split of the older keys, by an online softmax as in
`kernels.attend`. It norms and rotates its queries itself. The program of the first split does so with the new key too,
stores key and value, and begins its softmax with them: no program reads the new slot, so none waits for its write.

Splits are joined by the last program of a request and KV head (flash-decoding, Dao et al. 2023, in one kernel as in
stream-K, Osama et al. 2023). Each adds 1 to a counter after it has written its part, and whoever completes the count
sets it to 0, reads all parts, and adds them in their order. So the result does not depend on who is last.

Older keys are not written in the step. So a kernel that starts before the one in front of it ends fetches its first
keys and values at once, and waits only with the queries (see `kernels.attend`, `early`). It does not let the next
kernel in before it ends: the programs of that and of those behind it would be placed unevenly, beside what still runs.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from slotline.backends.triton.kernels import LOG2E, capped, write_results
from slotline.kernels.triton_launcher import Launcher, next_power_of_2
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, LayerCache
from slotline.registry.contracts.attention_edges import AttentionEdges
from slotline.registry.contracts.cache_tensors import PLAIN

MOST_GROUP, MOST = 32, 128
"""Most query heads of a KV head, and largest size of a head."""
FEWEST, MOST_LOAD = 2, 0.6
"""Requests from which on, and requests times KV heads for each multiprocessor up to which, one launch takes less time
than several. A single request has products of one row around it, which let all kernels of a step start early."""
LONGEST = 512
"""Most keys of a request for which that was measured."""
FEW_SPLITS, MOST_SPLITS = 8, 32
"""Splits that the kernel is compiled for: up to either."""
JOINED = 64
"""Parts that are joined at a time: in registers, of 128 numbers each."""
TILE, WARPS, STAGES = 128, 8, 2
"""Keys of a tile, warps of a program, and stages of its pipeline."""


class Single(NamedTuple):
    """Launch for requests of one query token each."""

    requests: int
    splits: int


class SingleTokens:
    """Launches the kernel for the layers of a group.

    Args:
        context: of the group.
        cores: the device's multiprocessors.
        early: whether kernels may start early (programmatic dependent launch).
    """

    def __init__(self, context: AttentionContext, cores: int, *, early: bool) -> None:
        layer = context.layers[0]
        self._group, self._kv_heads = layer.num_heads // layer.num_kv_heads, layer.num_kv_heads
        self._page, self._cores, self._early = context.kernel_block_size, cores, early
        self._launch = Launcher(attend_single)
        self._counters = torch.zeros(int(MOST_LOAD * cores) + 1, dtype=torch.int32, device=context.device)

    @staticmethod
    def serves(context: AttentionContext) -> bool:
        """Return True if the kernel supports a group's layers and its cache, and batch invariance is not required."""
        layer = context.layers[0]
        fits = layer.num_heads // layer.num_kv_heads <= MOST_GROUP and max(layer.head_size, layer.head_size_v) <= MOST
        plain = context.dtype == context.kv_dtype != "float32" and context.cache_format == PLAIN
        return fits and plain and not context.batch_invariant

    def launch_of(self, batch: AttentionBatch) -> Single | None:
        """Return the launch for a batch of single query tokens, None for batches that other kernels serve."""
        requests = batch.num_decodes
        load = requests * self._kv_heads / self._cores
        if requests < batch.num_requests or requests < FEWEST or load > MOST_LOAD:
            return None
        if batch.max_seq_len > LONGEST or not batch.causal or batch.tree is not None:
            return None
        splits = max(1, min(int(1 / load), MOST_SPLITS))
        return Single(requests, splits)

    def attend(
        self,
        layer: AttentionLayer,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cache: LayerCache,
        batch: AttentionBatch,
        single: Single,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        edges: AttentionEdges,
    ) -> torch.Tensor:
        """Norm and rotate, store, and attend: into `out` [num_tokens, heads, size_v]. Return the LSE.

        Args:
            states: query, key and value of the step.
            slopes: ALiBi's, [heads].
        """
        query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in states)
        lse = torch.empty((layer.num_heads, out.shape[0]), dtype=torch.float32, device=out.device)
        norms = edges.query_norm, edges.key_norm
        weights = [query if norm is None else norm.weight.contiguous() for norm in norms]
        cos, sin, rotary_size = query, query, 0
        if edges.cos is not None and edges.sin is not None:
            cos, sin, rotary_size = _rows(edges.cos), _rows(edges.sin), edges.rotary_size
        padded_v, splits = max(16, next_power_of_2(layer.head_size_v)), single.splits
        parts = part_norms = lse
        if splits > 1:
            rows = single.requests * layer.num_heads * splits
            parts = torch.empty(rows * (padded_v + 2), dtype=torch.float32, device=out.device)
            part_norms = parts[rows * padded_v :]
        padded_splits = 1 if splits == 1 else FEW_SPLITS if splits <= FEW_SPLITS else MOST_SPLITS
        self._launch(
            (single.requests * self._kv_heads, splits),
            query,
            key,
            value,
            cache.key,
            cache.value,
            batch.slot_mapping,
            out,
            lse,
            parts,
            part_norms,
            self._counters,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            lse if sinks is None else sinks,
            lse if slopes is None else slopes,
            *weights,
            cos,
            sin,
            *(number for norm in norms for number in ((0.0, 0.0) if norm is None else (norm.eps, norm.offset))),
            layer.scale if layer.soft_cap else layer.scale * LOG2E,
            layer.soft_cap or 1.0,
            layer.window or 0,
            *(stride for tensor in (query, key, value) for stride in tensor.stride()[:2]),
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            *out.stride()[:2],
            cos.stride(0) if rotary_size else 0,
            lse.stride(0),
            batch.block_table.stride(0),
            layer.num_heads,
            splits,
            self._group,
            layer.head_size,
            layer.head_size_v,
            max(16, next_power_of_2(layer.head_size)),
            padded_v,
            self._page,
            TILE,
            max(16, next_power_of_2(self._group)),
            padded_splits,
            min(next_power_of_2(self._group), max(1, JOINED * 128 // padded_v // padded_splits)),
            rotary_size,
            cos.shape[-1] if rotary_size else 0,
            norms[0] is not None,
            layer.window is not None,
            layer.soft_cap is not None,
            sinks is not None,
            slopes is not None,
            self._early,
            num_warps=WARPS,
            num_stages=STAGES,
            **({"launch_pdl": True} if self._early else {}),
        )
        return lse


def _rows(states: torch.Tensor) -> torch.Tensor:
    """Return cosines or sines [num_tokens, width] with the numbers of a row side by side."""
    return states if states.stride(1) == 1 else states.contiguous()


@triton.jit
def _turned(
    heads,
    there,
    weight,
    cos,
    sin,
    eps,
    offset,
    size: tl.constexpr,
    padded: tl.constexpr,
    rotary_size: tl.constexpr,
    cos_size: tl.constexpr,
    has_norm: tl.constexpr,
):
    """Return the heads at addresses [n, 1] that are `there`, normed and rotated, [n, padded] float32, else zeros."""
    half: tl.constexpr = rotary_size // 2
    dim = tl.arange(0, padded)[None, :]
    other = tl.where(dim < half, dim + half, dim - half)  # the other number of a pair
    paired = dim < 2 * half
    found = tl.load(heads + dim, mask=there & (dim < size), other=0.0).to(tl.float32)
    if rotary_size > 0:
        partner = tl.load(heads + other, mask=there & paired, other=0.0).to(tl.float32)
        place = tl.where(dim < half, dim, dim + cos_size - 2 * half)
        cosine = tl.load(cos + place, mask=paired, other=1.0).to(tl.float32)
        sine = tl.load(sin + place, mask=paired, other=0.0).to(tl.float32)
    if has_norm:
        factor = offset + tl.load(weight + dim, mask=dim < size, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(found * found, axis=1, keep_dims=True) / size + eps)
        found = found * scale * factor
        if rotary_size > 0:
            partner = partner * scale * (offset + tl.load(weight + other, mask=paired, other=0.0).to(tl.float32))
    if rotary_size > 0:
        found = found * cosine + tl.where(dim < half, -partner, partner) * sine
    return found


@triton.jit
def _fetched(
    keys,
    values,
    table,
    number,
    start,
    end,
    k_block,
    k_token,
    v_block,
    v_token,
    size: tl.constexpr,
    size_v: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
):
    """Return a tile's keys [padded, tile] and values [tile, padded_v], zeros outside of `start` .. `end`."""
    dim, dim_v = tl.arange(0, padded), tl.arange(0, padded_v)
    key = number * tile + tl.arange(0, tile)
    real = (key >= start) & (key < end)
    page_at = tl.load(table + key // page, mask=real, other=0).to(tl.int64)
    inside = key % page
    k_at = keys + (page_at * k_block + inside * k_token)[None, :] + dim[:, None]
    v_at = values + (page_at * v_block + inside * v_token)[:, None] + dim_v[None, :]
    k = tl.load(k_at, mask=real[None, :] & (dim < size)[:, None], other=0.0)
    v = tl.load(v_at, mask=real[:, None] & (dim_v < size_v)[None, :], other=0.0)
    return k, v


@triton.jit
def _added(
    q,
    k,
    v,
    number,
    start,
    end,
    place,
    scale,
    soft_cap,
    slope,
    top,
    norm,
    acc,
    tile: tl.constexpr,
    has_cap: tl.constexpr,
    has_slopes: tl.constexpr,
):
    """Return the maximum, sum and output with one more tile. Every query sees its keys from `start` to `end`."""
    key = number * tile + tl.arange(0, tile)
    scores = tl.dot(q, k)
    if has_cap:
        scores = capped(scores * scale, soft_cap)
        scale = 1.4426950408889634  # into base 2
    if has_slopes:  # ALiBi, in base 2
        scores = scores * scale + slope[:, None] * (key - place)[None, :]
        scale = 1.0
    scores = tl.where(((key >= start) & (key < end))[None, :], scores, -float("inf"))
    best = tl.maximum(top, tl.max(scores, 1) * scale)
    safe = tl.where(best == -float("inf"), 0.0, best)
    weights = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(top - safe)
    norm = norm * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None])
    return best, norm, acc


@triton.jit
def _join(
    parts,
    part_norms,
    out,
    lse,
    sinks,
    token,
    first_head,
    num_heads,
    last_head,
    num_splits,
    used,
    o_token,
    o_head,
    lse_head,
    size_v: tl.constexpr,
    padded_v: tl.constexpr,
    padded_splits: tl.constexpr,
    heads: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Join the first `used` splits of `heads` query heads of a token, in their order."""
    head = first_head + tl.arange(0, heads)
    index, dim = tl.arange(0, padded_splits), tl.arange(0, padded_v)
    there = head < last_head
    real = there[:, None] & (index < used)[None, :]
    slot = (token * num_heads + head)[:, None] * num_splits + index[None, :]
    # Others have written them: the cache of this multiprocessor is passed by.
    acc = tl.load(
        parts + slot[:, :, None] * padded_v + dim[None, None, :],
        mask=real[:, :, None],
        other=0.0,
        cache_modifier=".cg",
    )
    tops = tl.load(part_norms + slot * 2, mask=real, other=-float("inf"), cache_modifier=".cg")
    norms = tl.load(part_norms + slot * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 1)
    if has_sinks:
        sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    safe = tl.where(top == -float("inf"), 0.0, top)
    shrink = tl.exp2(tops - safe[:, None])
    norm = tl.sum(norms * shrink, 1)
    if has_sinks:
        norm += tl.exp2(sink - safe)
    acc = tl.sum(acc * shrink[:, :, None], 1)
    write_results(
        top, norm, acc, out, lse, sinks, token, head, there, o_token, o_head, lse_head, size_v, padded_v,
        has_sinks=False,  # they are in `norm`
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits", "lse_head", "table_row"])
def attend_single(
    query,
    key,
    value,
    keys,
    values,
    slots,
    out,
    lse,
    parts,
    part_norms,
    counters,
    table,
    seq_lens,
    starts,
    sinks,
    slopes,
    query_weight,
    key_weight,
    cos,
    sin,
    query_eps,
    query_offset,
    key_eps,
    key_offset,
    scale,
    soft_cap,
    window,
    q_token,
    q_head,
    key_token,
    key_head,
    value_token,
    value_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    o_token,
    o_head,
    cos_token,
    lse_head,
    table_row,
    num_heads,
    num_splits,
    group: tl.constexpr,
    size: tl.constexpr,
    size_v: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    block_m: tl.constexpr,
    padded_splits: tl.constexpr,
    joined: tl.constexpr,
    rotary_size: tl.constexpr,
    cos_size: tl.constexpr,
    has_norms: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    has_sinks: tl.constexpr,
    has_slopes: tl.constexpr,
    early: tl.constexpr,
):
    """Compute attention of one token of a request, or none, one KV head and one split of the keys.

    Grid: (requests times KV heads, splits at most). A request has so many splits that each has as many tiles as the
    others; the other programs end at once. With more than one, `padded_splits` is above 1, parts are [tokens, heads,
    num_splits, padded_v] and part_norms [tokens, heads, num_splits, 2] (maximum, sum), both unnormalised, and counters
    [requests times KV heads] are 0 before and after. The last program joins `joined` heads at a time.

    Queries and keys [tokens, heads, size] are normed and rotated, and the new key and value stored at the slot of their
    token. At slot -1 nothing is stored, and all keys are the cache's. `early`: the first tile is fetched while the
    kernel in front still runs. `scale` is for base 2 unless capped. Results go to out [tokens, heads, size_v] and lse
    [heads, tokens].
    """
    kv_heads = num_heads // group
    head, request, index = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads, tl.program_id(1)
    token = tl.load(starts + request).to(tl.int64)
    has_token = tl.load(starts + request + 1) > token
    length = tl.load(seq_lens + request)
    slot = tl.load(slots + token, mask=has_token, other=-1)
    end = tl.where(slot >= 0, length - 1, length)
    start = 0
    if has_window:
        start = tl.maximum(0, length - window)
    first_tile = start // tile
    tiles = tl.maximum(tl.cdiv(end, tile) - first_tile, 0)
    each = tl.maximum(tl.cdiv(tiles, num_splits), 1)
    used_splits = tl.maximum(tl.cdiv(tiles, each), 1)
    last_tile = first_tile + tl.minimum(tiles, (index + 1) * each)
    first_tile += index * each
    if (index >= used_splits) | (has_token == 0):
        if early:
            gdc_wait()  # the next kernel assumes that everything before this one has ended
        return

    table += request.to(tl.int64) * table_row
    keys += head * k_head
    values += head * v_head
    if early:
        held_k, held_v = _fetched(
            keys, values, table, first_tile, start, end, k_block, k_token, v_block, v_token, size, size_v, padded,
            padded_v, page, tile,
        )  # fmt: skip
        gdc_wait()

    row, dim, dim_v = tl.arange(0, block_m), tl.arange(0, padded), tl.arange(0, padded_v)
    used = row < group
    query_head = head * group + row
    q_at = query + (token * q_token + query_head * q_head)[:, None]
    slope = scale
    if has_slopes:
        slope = tl.load(slopes + query_head, mask=used, other=0.0) * 1.4426950408889634
    cos += token * cos_token
    sin += token * cos_token
    own = tl.zeros([1], tl.int32) + index == tl.where(slot >= 0, 0, -1)
    new = _turned(
        key + token * key_token + head * key_head, own[:, None], key_weight, cos, sin, key_eps, key_offset, size,
        padded, rotary_size, cos_size, has_norms,
    ).to(keys.dtype.element_ty)  # fmt: skip
    new_v = tl.load(value + token * value_token + head * value_head + dim_v, mask=own & (dim_v < size_v), other=0.0).to(
        values.dtype.element_ty
    )
    q = _turned(
        q_at, used[:, None], query_weight, cos, sin, query_eps, query_offset, size, padded, rotary_size, cos_size,
        has_norms,
    ).to(query.dtype.element_ty)  # fmt: skip
    block, inside = slot // page, slot % page
    k_at = keys + block * k_block + inside * k_token + dim[None, :]
    tl.store(k_at, new, mask=own[:, None] & (dim < size)[None, :])
    tl.store(values + block * v_block + inside * v_token + dim_v, new_v, mask=own & (dim_v < size_v))
    top = tl.sum(q.to(tl.float32) * new.to(tl.float32), 1) * scale
    if has_cap:
        top = capped(top, soft_cap) * 1.4426950408889634
    top = tl.where(own, top, -float("inf"))
    norm = tl.where(own, tl.full([block_m], 1.0, tl.float32), 0.0)
    acc = tl.zeros([block_m, padded_v], tl.float32) + new_v.to(tl.float32)[None, :]

    place = length - 1
    if early:
        top, norm, acc = _added(
            q, held_k, held_v, first_tile, start, end, place, scale, soft_cap, slope, top, norm, acc, tile, has_cap,
            has_slopes,
        )  # fmt: skip
        first_tile += 1
    for number in tl.range(first_tile, last_tile):
        k, v = _fetched(
            keys, values, table, number, start, end, k_block, k_token, v_block, v_token, size, size_v, padded, padded_v,
            page, tile,
        )  # fmt: skip
        top, norm, acc = _added(
            q, k, v, number, start, end, place, scale, soft_cap, slope, top, norm, acc, tile, has_cap, has_slopes,
        )  # fmt: skip

    alone = True
    if padded_splits > 1:
        alone = used_splits == 1
    if alone:
        write_results(
            top, norm, acc, out, lse, sinks, token, query_head, used, o_token, o_head, lse_head, size_v, padded_v,
            has_sinks,
        )  # fmt: skip
    else:
        part = (token * num_heads + query_head) * num_splits + index
        tl.store(parts + part[:, None] * padded_v + dim_v[None, :], acc, mask=used[:, None])
        tl.store(part_norms + part * 2, top, mask=used)
        tl.store(part_norms + part * 2 + 1, norm, mask=used)
        tl.debug_barrier()  # all threads have written before one of them says so
        before = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel")
        if before == used_splits - 1:
            tl.store(counters + tl.program_id(0), 0)
            for first in tl.static_range(0, group, joined):
                _join(
                    parts, part_norms, out, lse, sinks, token, head * group + first, num_heads, (head + 1) * group,
                    num_splits, used_splits, o_token, o_head, lse_head, size_v, padded_v, padded_splits, joined,
                    has_sinks,
                )  # fmt: skip
