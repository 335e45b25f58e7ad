"""Attention of prompts that begin in this step: their keys and values are read from the step's own tensors.

The same online softmax as in `kernels.attend`, over contiguous rows. A tile that all queries of a block see is one box
that the copy engine loads (a tensor descriptor), without an address for each key and without a mask. Tiles on the
diagonal are loaded by address, so that nothing is read after a prompt's end.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.backends.triton.kernels import _find_request


@triton.jit
def _step(scores, values, scale, top, norm, acc):
    """Return the new maximum, sum and output of the rows. Every row sees a key in its first tile."""
    best = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - best[:, None])
    shrink = tl.exp2(top - best)
    norm = norm * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
    return best, norm, acc


@triton.jit(do_not_specialize=["first", "num_requests", "lse_head"])
def attend_prompts(
    query,
    key,
    value,
    key_boxes,
    value_boxes,
    out,
    lse,
    starts,
    sinks,
    first,
    num_requests,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    o_token,
    o_head,
    lse_head,
    kv_heads,
    group: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    block_q: tl.constexpr,
    block_m: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Compute one block of queries of one of the requests `first` .. `num_requests`, and one KV head.

    Grid: (blocks times KV heads), in the order of `kernels.attend`.

    query is [tokens, heads, size]. key and value are [tokens, KV heads, size], and the same memory as boxes of [tile,
    size] out of [tokens, KV heads * size]. out and lse are as in `kernels.attend`. `scale` is for base 2.
    """
    head, place = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    last = tl.num_programs(0) // kv_heads - 1  # the last blocks see most keys: they begin first
    request, block = _find_request(last - place, starts, first, num_requests, block_q)
    begin = tl.load(starts + request)
    length = tl.load(starts + request + 1) - begin
    if block * block_q >= length:
        return
    row, column, dim = tl.arange(0, block_m), tl.arange(0, tile), tl.arange(0, size)
    token = block * block_q + row // group  # [block_m]
    query_head = head * group + row % group
    used = (row < block_q * group) & (token < length)
    where = (begin + token).to(tl.int64)
    q_at = query + where * q_token + query_head * q_head
    q = tl.load(q_at[:, None] + dim[None, :], mask=used[:, None], other=0.0)
    top = tl.full([block_m], -float("inf"), tl.float32)
    norm = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, size], tl.float32)
    whole = (block * block_q + 1) // tile  # tiles that even the block's first query sees
    for number in tl.range(0, whole):
        keys = key_boxes.load([begin + number * tile, head * size])
        values = value_boxes.load([begin + number * tile, head * size])
        top, norm, acc = _step(tl.dot(q, keys.T), values, scale, top, norm, acc)
    key += begin.to(tl.int64) * k_token + head * k_head
    value += begin.to(tl.int64) * v_token + head * v_head
    for number in tl.range(whole, tl.cdiv(tl.minimum(length, (block + 1) * block_q), tile)):
        at = number * tile + column
        real = at < length
        keys = tl.load(key + at[None, :] * k_token + dim[:, None], mask=real[None, :], other=0.0)
        values = tl.load(value + at[:, None] * v_token + dim[None, :], mask=real[:, None], other=0.0)
        scores = tl.where(at[None, :] <= token[:, None], tl.dot(q, keys), -float("inf"))
        top, norm, acc = _step(scores, values, scale, top, norm, acc)
    if has_sinks:
        sink = tl.load(sinks + query_head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        best = tl.maximum(top, sink)
        shrink = tl.exp2(top - best)
        norm = norm * shrink + tl.exp2(sink - best)
        acc = acc * shrink[:, None]
        top = best
    result = acc / norm[:, None]
    o_at = out + where * o_token + query_head * o_head
    tl.store(o_at[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=used[:, None])
    tl.store(lse + query_head.to(tl.int64) * lse_head + where, (top + tl.log2(norm)) * 0.6931471805599453, mask=used)
