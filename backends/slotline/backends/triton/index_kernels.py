"""Sparse attention over latents in Triton: scores of an index, the keys that it picks, attention to these alone.

The index is DeepSeek-V3.2's (arXiv 2512.02556, section 2.1). Keys are picked by a radix selection over the scores' bits
(Alabi et al. 2012, "Fast k-selection algorithms for graphics processing units"): four passes of eight bits find the
lowest picked score, and one more collects the slots in the order of their positions. So of equal scores the lower
positions are picked, and a picked key is one load away for every layer that shares the block table.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.backends.triton.latent_kernels import _find_request

BINS: int = 256
"""Numbers of eight bits."""


@triton.jit(do_not_specialize=["first", "num_requests", "num_splits"])
def score_keys(
    query,
    weight,
    keys,
    scores,
    table,
    seq_lens,
    starts,
    first,
    num_requests,
    q_token,
    q_head,
    w_token,
    w_head,
    k_block,
    k_token,
    s_token,
    table_row,
    num_splits,
    heads: tl.constexpr,
    padded_heads: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    block_q: tl.constexpr,
    single: tl.constexpr,
    exact: tl.constexpr,
):
    """Score a split of a request's keys for a block of its query tokens. Grid: (blocks of tokens, splits).

    Requests are `first` .. `num_requests`. `single` means that each has one query token. Scores go to [tokens, keys]
    float32. Those of keys after the last query of a block are left as they are.
    """
    if single:
        request, block = first + tl.program_id(0), 0
    else:
        last = tl.num_programs(0) - 1  # the last blocks of a prompt have most keys
        request, block = _find_request(last - tl.program_id(0), starts, first, num_requests, 1, block_q)
    begin = tl.load(starts + request)
    query_len = tl.load(starts + request + 1) - begin
    length = tl.load(seq_lens + request)
    if block * block_q >= query_len:
        return
    count = tl.minimum(query_len - block * block_q, block_q)
    end = tl.minimum(length, length - query_len + block * block_q + count)
    last_tile = tl.cdiv(end, tile)
    share = tl.cdiv(last_tile, num_splits)
    first_tile = tl.program_id(1) * share
    last_tile = tl.minimum(last_tile, first_tile + share)
    table += request.to(tl.int64) * table_row
    head, dim = tl.arange(0, padded_heads), tl.arange(0, padded)
    known = head < heads
    for number in range(first_tile, last_tile):
        key = number * tile + tl.arange(0, tile)
        real = key < end
        place = tl.load(table + key // page, mask=real, other=0).to(tl.int64)
        at = keys + (place * k_block + (key % page) * k_token)[:, None] + dim[None, :]
        stored = tl.load(at, mask=real[:, None] & (dim < size)[None, :], other=0.0)
        for token in range(count):
            row = (begin + block * block_q + token).to(tl.int64)
            q_at = query + row * q_token + (head * q_head)[:, None] + dim[None, :]
            q = tl.load(q_at, mask=known[:, None] & (dim < size)[None, :], other=0.0)
            if exact:
                products = tl.dot(q, tl.trans(stored.to(q.dtype)), input_precision="ieee")
            else:
                products = tl.dot(q, tl.trans(stored.to(q.dtype)))
            factor = tl.load(weight + row * w_token + head * w_head, mask=known, other=0.0)
            score = tl.sum(tl.maximum(products, 0.0) * factor[:, None], 0)
            tl.store(scores + row * s_token + key, score, mask=real)


@triton.jit
def _ordered(score):
    """Return unsigned numbers in the order of scores, with one for both zeros."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["first", "num_requests", "most"])
def pick_keys(
    scores,
    picks,
    counts,
    table,
    seq_lens,
    starts,
    first,
    num_requests,
    most,
    s_token,
    p_token,
    table_row,
    page: tl.constexpr,
    tile: tl.constexpr,
    single: tl.constexpr,
):
    """Write the slots of the `most` keys with the highest scores of one query token, and their number.

    Slots go to picks [tokens, most] int32 in the order of positions, numbers to counts [tokens] int32. Grid: query
    tokens of requests `first` .. `num_requests`, one each if `single`.
    """
    if single:
        request, offset = first + tl.program_id(0), 0
    else:
        request, offset = _find_request(tl.program_id(0), starts, first, num_requests, 1, 1)
        # Each request has room for one more block of rows than it has rows.
    begin = tl.load(starts + request)
    query_len = tl.load(starts + request + 1) - begin
    if offset >= query_len:
        return
    row = (begin + offset).to(tl.int64)
    length = tl.load(seq_lens + request) - query_len + offset + 1  # keys that the token may see
    table += request.to(tl.int64) * table_row
    scores += row * s_token
    picks += row * p_token
    index = tl.arange(0, tile)
    wanted = tl.minimum(length, most)
    tl.store(counts + row, tl.maximum(wanted, 0))
    lowest = tl.zeros([], tl.uint32)  # the lowest picked score, found eight bits at a time
    left = wanted  # how many of the scores that begin with these bits are picked
    if length > most:
        bins = tl.arange(0, 256)
        for digit in tl.static_range(4):
            shift: tl.constexpr = 24 - 8 * digit
            found = tl.zeros([256], tl.int32)
            for begin_tile in range(0, length, tile):
                key = begin_tile + index
                real = key < length
                number = _ordered(tl.load(scores + key, mask=real, other=0.0))
                if digit > 0:
                    real = real & ((number >> (shift + 8)) == (lowest >> (shift + 8)))
                found += tl.histogram(((number >> shift) & 255).to(tl.int32), 256, mask=real)
            above = tl.sum(found, 0) - tl.cumsum(found, 0)
            here = (above < left) & (left <= above + found)
            lowest = lowest | (tl.sum(tl.where(here, bins, 0), 0).to(tl.uint32) << shift)
            left = left - tl.sum(tl.where(here, above, 0), 0)
    equals, written = 0, 0
    for begin_tile in range(0, length, tile):
        key = begin_tile + index
        real = key < length
        taken = real
        if length > most:
            number = _ordered(tl.load(scores + key, mask=real, other=0.0))
            equal = real & (number == lowest)
            rank = equals + tl.cumsum(equal.to(tl.int32), 0)
            taken = real & ((number > lowest) | (equal & (rank <= left)))
            equals += tl.sum(equal.to(tl.int32), 0)
        to = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        slot = tl.load(table + key // page, mask=taken, other=0) * page + key % page
        tl.store(picks + to, slot, mask=taken)
        written += tl.sum(taken.to(tl.int32), 0)


@triton.jit(do_not_specialize=["lse_head", "num_splits"])
def attend_picks(
    query,
    latents,
    out,
    lse,
    parts,
    part_norms,
    picks,
    counts,
    scale,
    q_token,
    q_head,
    k_block,
    k_token,
    o_token,
    o_head,
    lse_head,
    p_token,
    num_splits,
    heads: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    padded: tl.constexpr,
    padded_rope: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    block_m: tl.constexpr,
    split: tl.constexpr,
    exact: tl.constexpr,
):
    """Compute a block of heads of one query token over a split of its picks. Grid: (tokens * blocks of heads, splits).

    Results are as those of `latent_kernels.attend_latents`, which has the same online softmax. `scale` is for base 2.
    """
    each: tl.constexpr = (heads + block_m - 1) // block_m
    token = (tl.program_id(0) // each).to(tl.int64)
    index = tl.program_id(1)
    head = tl.program_id(0) % each * block_m + tl.arange(0, block_m)
    used = head < heads
    dim, dim_rope = tl.arange(0, padded), tl.arange(0, padded_rope)
    at = query + token * q_token + (head * q_head)[:, None]
    q = tl.load(at + dim[None, :], mask=used[:, None] & (dim < rank)[None, :], other=0.0)
    q_rope = q
    if rope > 0:
        q_rope = tl.load(at + rank + dim_rope[None, :], mask=used[:, None] & (dim_rope < rope)[None, :], other=0.0)
    count = tl.load(counts + token)
    picks += token * p_token
    first_tile, last_tile = 0, tl.cdiv(count, tile)
    if split:
        share = tl.cdiv(last_tile, num_splits)
        first_tile = index * share
        last_tile = tl.minimum(last_tile, first_tile + share)

    top = tl.full([block_m], -float("inf"), tl.float32)
    norm = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, padded], tl.float32)
    for number in tl.range(first_tile, last_tile):
        place = number * tile + tl.arange(0, tile)
        real = place < count
        slot = tl.load(picks + place, mask=real, other=0).to(tl.int64)
        row_at = latents + (slot // page * k_block + slot % page * k_token)[:, None]
        latent = tl.load(row_at + dim[None, :], mask=real[:, None] & (dim < rank)[None, :], other=0.0).to(q.dtype)
        if exact:  # noqa: SIM108 - the compiler compiles both sides of an expression
            scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(latent))
        if rope > 0:
            turned = tl.load(
                row_at + rank + dim_rope[None, :], mask=real[:, None] & (dim_rope < rope)[None, :], other=0.0
            ).to(q.dtype)
            if exact:
                scores += tl.dot(q_rope, tl.trans(turned), input_precision="ieee")
            else:
                scores = tl.dot(q_rope, tl.trans(turned), scores)
        scores = tl.where(real[None, :], scores, -float("inf"))
        best = tl.maximum(top, tl.max(scores, 1) * scale)
        safe = tl.where(best == -float("inf"), 0.0, best)
        weights = tl.exp2(scores * scale - safe[:, None])
        shrink = tl.exp2(top - safe)
        norm = norm * shrink + tl.sum(weights, 1)
        if exact:
            acc = acc * shrink[:, None] + tl.dot(weights, latent, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(q.dtype), latent, acc * shrink[:, None])
        top = best

    if split:
        to = (token * heads + head) * num_splits + index
        tl.store(parts + to[:, None] * padded + dim[None, :], acc, mask=used[:, None])
        tl.store(part_norms + to * 2, top, mask=used)
        tl.store(part_norms + to * 2 + 1, norm, mask=used)
        return
    result = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
    tl.store(
        out + (token * o_token + head * o_head)[:, None] + dim[None, :],
        result.to(out.dtype.element_ty),
        mask=used[:, None] & (dim < rank)[None, :],
    )
    tl.store(lse + head.to(tl.int64) * lse_head + token, (top + tl.log2(norm)) * 0.6931471805599453, mask=used)
