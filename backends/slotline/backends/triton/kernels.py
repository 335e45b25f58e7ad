"""Paged attention in Triton: a kernel for decode, prefill and all between, one that joins split keys, one that stores.

A program serves a block of query tokens of one request and one KV head: its rows are those tokens times the query heads
of the head's group, so keys and values are read once for all of them. It walks over tiles of keys with an online
softmax in base 2 (Dao et al. 2022, algorithm 1; Milakov and Gimelshein 2018). Where few programs would fill the device,
the keys are cut into splits and joined afterwards (flash-decoding, Dao et al. 2023).

Slots that hold no key of the request, freed blocks and the null block are masked before they are read.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def _find_request(block, starts, first, num_requests, block_q: tl.constexpr):
    """The request of a block of queries. Request r begins at block (tokens before) // block_q + (requests before).

    That leaves each request room for all its blocks; what it does not need stays empty.
    """
    offset = tl.load(starts + first)
    low, high = first, num_requests
    while low + 1 < high:
        middle = (low + high) // 2
        begin = (tl.load(starts + middle) - offset) // block_q + middle - first
        if begin <= block:
            low = middle
        else:
            high = middle
    begin = (tl.load(starts + low) - offset) // block_q + low - first
    return low, block - begin


@triton.jit
def attend(
    query,
    keys,
    values,
    out,
    lse,
    parts,
    part_norms,
    table,
    seq_lens,
    starts,
    sinks,
    first,
    num_requests,
    scale,
    soft_cap,
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
    num_heads,
    num_splits,
    window,
    group: tl.constexpr,
    size: tl.constexpr,
    size_v: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    block_q: tl.constexpr,
    block_m: tl.constexpr,
    single: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    has_sinks: tl.constexpr,
    causal: tl.constexpr,
    split: tl.constexpr,
    exact: tl.constexpr,
):
    """One block of queries, one KV head, one split of the keys.

    Grid: (blocks of queries, KV heads, splits). `first` .. `num_requests` are the requests served; `single` says that
    each has one query token. Unsplit results go to
    out [tokens, heads, size_v] and lse [heads, tokens]; split ones, unnormalised, to parts [tokens, heads, splits,
    padded_v] with part_norms [tokens, heads, splits, 2] (maximum, sum). `scale` counts in base 2 unless capped.
    """
    head, index = tl.program_id(1), tl.program_id(2)
    request, block = first + tl.program_id(0), 0
    if not single:
        request, block = _find_request(tl.program_id(0), starts, first, num_requests, block_q)
    begin = tl.load(starts + request)
    query_len = tl.load(starts + request + 1) - begin
    if block * block_q >= query_len:
        return
    length = tl.load(seq_lens + request)
    row = tl.arange(0, block_m)
    token = block * block_q + row // group
    query_head = head * group + row % group
    used = (row < block_q * group) & (token < query_len)
    position = length - query_len + token  # [block_m]
    dim, dim_v = tl.arange(0, padded), tl.arange(0, padded_v)
    at = (begin + token).to(tl.int64) * q_token + query_head * q_head
    q = tl.load(query + at[:, None] + dim[None, :], mask=used[:, None] & (dim < size)[None, :], other=0.0)

    end = length
    if causal:
        end = tl.minimum(length, length - query_len + (block + 1) * block_q)
    start = 0
    if has_window:
        start = tl.maximum(0, length - query_len + block * block_q - window + 1)
    first_tile = start // tile
    last_tile = tl.cdiv(end, tile)
    if split:
        each = tl.cdiv(last_tile - first_tile, num_splits)
        first_tile += index * each
        last_tile = tl.minimum(last_tile, first_tile + each)

    top = tl.full([block_m], -float("inf"), tl.float32)
    norm = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, padded_v], tl.float32)
    offset = tl.arange(0, tile)
    for number in tl.range(first_tile, last_tile):
        key = number * tile + offset
        real = (key >= start) & (key < end)
        place = tl.load(table + request.to(tl.int64) * table_row + key // page, mask=real, other=0).to(tl.int64)
        inside = key % page
        k_at = place * k_block + inside * k_token + head * k_head
        k = tl.load(keys + k_at[None, :] + dim[:, None], mask=real[None, :] & (dim < size)[:, None], other=0.0)
        v_at = place * v_block + inside * v_token + head * v_head
        v = tl.load(values + v_at[:, None] + dim_v[None, :], mask=real[:, None] & (dim_v < size_v)[None, :], other=0.0)
        if exact:
            scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee") * scale
        else:
            scores = tl.dot(q, k.to(q.dtype)) * scale
        if has_cap:
            # tanh by exp, safe for large scores; then into base 2
            small = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(scores / soft_cap))
            capped = soft_cap * (1.0 - small) / (1.0 + small)
            scores = tl.where(scores < 0, -capped, capped) * 1.4426950408889634
        seen = real[None, :]
        if causal:
            seen = seen & (key[None, :] <= position[:, None])
        if has_window:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(best == -float("inf"), 0.0, best)  # a row that has seen nothing yet
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        norm = norm * shrink + tl.sum(weights, 1)
        if exact:
            acc = acc * shrink[:, None] + tl.dot(weights, v.to(tl.float32), input_precision="ieee")
        else:
            acc = acc * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype))
        top = best

    where = (begin + token).to(tl.int64)
    if split:
        slot = (where * num_heads + query_head) * num_splits + index
        tl.store(parts + slot[:, None] * padded_v + dim_v[None, :], acc, mask=used[:, None])
        tl.store(part_norms + slot * 2, top, mask=used)
        tl.store(part_norms + slot * 2 + 1, norm, mask=used)
        return
    if has_sinks:
        sink = tl.load(sinks + query_head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        best = tl.maximum(top, sink)
        shrink = tl.exp2(top - best)
        norm = norm * shrink + tl.exp2(sink - best)
        acc = acc * shrink[:, None]
        top = best
    result = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
    o_at = where * o_token + query_head * o_head
    tl.store(
        out + o_at[:, None] + dim_v[None, :],
        result.to(out.dtype.element_ty),
        mask=used[:, None] & (dim_v < size_v)[None, :],
    )
    tl.store(lse + query_head.to(tl.int64) * lse_head + where, (top + tl.log2(norm)) * 0.6931471805599453, mask=used)


@triton.jit
def join(
    out,
    lse,
    parts,
    part_norms,
    sinks,
    first_token,
    o_token,
    o_head,
    lse_head,
    num_heads,
    num_splits,
    size_v: tl.constexpr,
    padded_v: tl.constexpr,
    padded_splits: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Join the splits of one token and query head. Grid: (tokens from `first_token` on, heads)."""
    token, head = (first_token + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    slot = (token * num_heads + head) * num_splits
    index, dim = tl.arange(0, padded_splits), tl.arange(0, padded_v)
    real = index < num_splits
    tops = tl.load(part_norms + (slot + index) * 2, mask=real, other=-float("inf"))
    norms = tl.load(part_norms + (slot + index) * 2 + 1, mask=real, other=0.0)
    top = tl.max(tops, 0)
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    safe = tl.where(top == -float("inf"), 0.0, top)
    shrink = tl.exp2(tops - safe)
    norm = tl.sum(norms * shrink, 0)
    if has_sinks:
        norm += tl.exp2(sink - safe)
    acc = tl.load(parts + (slot + index)[:, None] * padded_v + dim[None, :], mask=real[:, None], other=0.0)
    result = tl.sum(acc * shrink[:, None], 0) / tl.where(norm == 0.0, 1.0, norm)
    tl.store(out + token * o_token + head * o_head + dim, result.to(out.dtype.element_ty), mask=dim < size_v)
    tl.store(lse + head.to(tl.int64) * lse_head + token, (top + tl.log2(norm)) * 0.6931471805599453)


@triton.jit
def store(
    key,
    value,
    keys,
    values,
    slots,
    key_token,
    value_token,
    key_head,
    value_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    size_v: tl.constexpr,
    padded_heads: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    page: tl.constexpr,
):
    """Write one token's key and value, all heads, to its slot; slot -1 is left out. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, inside = slot // page, slot % page
    head = tl.arange(0, padded_heads)[:, None]
    dim, dim_v = tl.arange(0, padded)[None, :], tl.arange(0, padded_v)[None, :]
    here = (head < num_heads) & (dim < size)
    new = tl.load(key + token * key_token + head * key_head + dim, mask=here)
    tl.store(keys + block * k_block + inside * k_token + head * k_head + dim, new.to(keys.dtype.element_ty), mask=here)
    here = (head < num_heads) & (dim_v < size_v)
    new = tl.load(value + token * value_token + head * value_head + dim_v, mask=here)
    target = values + block * v_block + inside * v_token + head * v_head + dim_v
    tl.store(target, new.to(values.dtype.element_ty), mask=here)
