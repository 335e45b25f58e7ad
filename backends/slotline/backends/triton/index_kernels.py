"""Sparse attention over latents in Triton: scores of an index, the keys that it picks, attention to these alone.

The index is DeepSeek-V3.2's (arXiv 2512.02556, section 2.1). Keys are picked by bisection: scores are compared as whole
numbers in the same order, and counting how many are not below the middle of what is left halves that. It ends early
where the count is the wanted one. Scores stay in registers meanwhile, where they fit (as in Alabi et al. 2012, "Fast
k-selection algorithms for graphics processing units", section 3). Slots are collected in the order of their positions.
So of equal scores the lower positions are picked, and a picked key is one load away for every layer that shares the
block table.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.backends.triton.latent_kernels import _find_request, on_path


@triton.jit(do_not_specialize=["num_nodes", "nodes_row", "first", "num_requests", "low", "high", "num_splits"])
def score_keys(
    query,
    weight,
    keys,
    scores,
    table,
    seq_lens,
    starts,
    nodes,
    sees,
    num_nodes,
    nodes_row,
    first,
    num_requests,
    low,
    high,
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
    has_tree: tl.constexpr,
    exact: tl.constexpr,
):
    """Score a split of a request's keys for a block of its query tokens. Grid: (blocks of tokens, splits).

    Requests are `first` .. `num_requests`. `single` means that each has one query token. Scores of query tokens `low`
    .. `high` go to [tokens from `low` on, keys] float32. Those of keys after the last query of a block are left as they
    are. `has_tree`: the last nodes [requests] query tokens of each request are the first nodes of a tree, as in
    `kernels.attend`, and nodes that are not on a token's path have the score of minus infinity.
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
    row = begin + block * block_q
    count = tl.minimum(tl.minimum(query_len - block * block_q, block_q), high - row)
    skipped = tl.maximum(low - row, 0)
    if skipped >= count:
        return
    end = tl.minimum(length, length - query_len + block * block_q + count)
    last_tile = tl.cdiv(end, tile)
    share = tl.cdiv(last_tile, num_splits)
    first_tile = tl.program_id(1) * share
    last_tile = tl.minimum(last_tile, first_tile + share)
    table += request.to(tl.int64) * table_row
    before, node = length, -1  # keys before a tree's nodes, and the number of the block's first token among these
    if has_tree:
        before = length - tl.load(nodes + request)
        node = length - query_len + block * block_q - before + tl.zeros([1], tl.int32)
        sees += request.to(tl.int64) * nodes_row * num_nodes
    head, dim = tl.arange(0, padded_heads), tl.arange(0, padded)
    known = head < heads
    taken = known[:, None] & (dim < size)[None, :]
    q_at = query + (head * q_head)[:, None] + dim[None, :]
    w_at = weight + head * w_head
    row = row.to(tl.int64)
    scores += (row - low) * s_token
    if single:  # a loop without another inside it, so that keys of later tiles are asked for ahead
        q = tl.load(q_at + row * q_token, mask=taken, other=0.0)
        factor = tl.load(w_at + row * w_token, mask=known, other=0.0)
        for number in tl.range(first_tile, last_tile):
            key = number * tile + tl.arange(0, tile)
            real = key < end
            stored = _index_keys(keys, table, key, real, dim, k_block, k_token, size, page).to(q.dtype)
            found = _scores(q, stored, factor, exact)
            if has_tree:
                found = tl.where(on_path(sees, node, key - before, real, num_nodes), found, -float("inf"))
            tl.store(scores + key, found, mask=real)
    else:
        for number in range(first_tile, last_tile):
            key = number * tile + tl.arange(0, tile)
            real = key < end
            stored = _index_keys(keys, table, key, real, dim, k_block, k_token, size, page)
            for token in range(skipped, count):
                q = tl.load(q_at + (row + token) * q_token, mask=taken, other=0.0)
                factor = tl.load(w_at + (row + token) * w_token, mask=known, other=0.0)
                found = _scores(q, stored.to(q.dtype), factor, exact)
                if has_tree:
                    found = tl.where(on_path(sees, node + token, key - before, real, num_nodes), found, -float("inf"))
                tl.store(scores + token * s_token + key, found, mask=real)


@triton.jit
def _index_keys(keys, table, key, real, dim, k_block, k_token, size: tl.constexpr, page: tl.constexpr):
    """Load the index's keys of some positions, [keys, dims]."""
    place = tl.load(table + key // page, mask=real, other=0).to(tl.int64)
    at = keys + (place * k_block + (key % page) * k_token)[:, None] + dim[None, :]
    return tl.load(at, mask=real[:, None] & (dim < size)[None, :], other=0.0)


@triton.jit
def _scores(q, stored, factor, exact: tl.constexpr):
    """Return the scores [keys] float32 of keys for one token."""
    if exact:  # noqa: SIM108 - the compiler compiles both sides of an expression
        products = tl.dot(q, tl.trans(stored), input_precision="ieee")
    else:
        products = tl.dot(q, tl.trans(stored))
    return tl.sum(tl.maximum(products, 0.0) * factor[:, None], 0)


@triton.jit
def _score_of(number):
    """Return the score of a number that `_ordered` gave."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits ^ ((~bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _ordered(score):
    """Return unsigned numbers in the order of scores, with one for both zeros."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit(
    do_not_specialize=["num_nodes", "nodes_row", "first", "num_requests", "low", "high", "most", "l_token", "p_token"]
)
def pick_keys(
    scores,
    table,
    listed_scores,
    listed,
    picks,
    counts,
    seq_lens,
    starts,
    nodes,
    sees,
    num_nodes,
    nodes_row,
    first,
    num_requests,
    low,
    high,
    most,
    s_token,
    table_row,
    l_token,
    p_token,
    page: tl.constexpr,
    tile: tl.constexpr,
    padded_nodes: tl.constexpr,
    single: tl.constexpr,
    turn: tl.constexpr,
):
    """Write the slots of the `most` keys with the highest scores of one query token, and their number.

    Slots go to picks [tokens, most] int32 in the order of positions, numbers to counts [tokens] int32. Grid: query
    tokens of requests `first` .. `num_requests`, one each if `single`, by tiles of keys. Only those of `low` .. `high`
    are served, whose scores are given.

    `turn` is "only" to pick among all keys. Where there are several tiles, "first" puts the best `most` of each on a
    list, listed_scores and listed [tokens from `low` on, tiles * most], and "last" picks among the listed ones.

    `padded_nodes` is a power of two of at least `num_nodes` if there is a tree, as in `score_keys`, else 0. A token has
    only the known keys and those of its path then.
    """
    if single:
        request, offset = first + tl.program_id(0), 0
    else:
        request, offset = _find_request(tl.program_id(0), starts, first, num_requests, 1, 1)
        # Each request has room for one more block of rows than it has rows.
    begin = tl.load(starts + request)
    query_len = tl.load(starts + request + 1) - begin
    row = (begin + offset).to(tl.int64)
    if (offset >= query_len) | (row < low) | (row >= high):
        return
    length = tl.load(seq_lens + request) - query_len + offset + 1  # keys that the token may see
    scores += (row - low) * s_token
    table += request.to(tl.int64) * table_row
    listed_scores += (row - low) * l_token
    listed += (row - low) * l_token
    if turn == "first":
        at = tl.program_id(1) * tile
        count = tl.minimum(length - at, tile)
        if count <= 0:
            return
        key = at + tl.arange(0, tile)
        real = key < length
        number = _ordered(tl.load(scores + key, mask=real, other=-float("inf")))
        limit, left = _limit(number, real, count, most)
        taken, to, _, _ = _taken(number, real, limit, left, 0, tl.program_id(1) * most)
        slot = tl.load(table + key // page, mask=taken, other=0) * page + key % page
        tl.store(listed + to, slot, mask=taken)
        tl.store(listed_scores + to, _score_of(number), mask=taken)
        return
    seen = length
    if padded_nodes > 0:
        before = tl.load(seq_lens + request) - tl.load(nodes + request)
        node, other = length - 1 - before, tl.arange(0, padded_nodes)
        sees += request.to(tl.int64) * nodes_row * num_nodes
        path = tl.load(sees + node * num_nodes + other, mask=other <= node, other=0)
        if node >= 0:
            seen = before + tl.sum((path != 0).to(tl.int32), 0)
    picks += row * p_token
    if turn == "last":
        scores, whole = listed_scores, length // tile
        length = whole * most + tl.minimum(length - whole * tile, most)
    most = tl.maximum(tl.minimum(seen, most), 0)
    tl.store(counts + row, most)
    if length <= tile:
        key = tl.arange(0, tile)
        real = key < length
        number = _ordered(tl.load(scores + key, mask=real, other=-float("inf")))
        limit, left = _limit(number, real, length, most)
        _write(number, real, key, limit, left, 0, 0, picks, table, listed, page, turn)
    else:
        limit, left = _limit_in_tiles(scores, length, most, tile)
        equals, written = 0, 0
        for start in range(0, length, tile):
            key = start + tl.arange(0, tile)
            real = key < length
            number = _ordered(tl.load(scores + key, mask=real, other=-float("inf")))
            equals, written = _write(number, real, key, limit, left, equals, written, picks, table, listed, page, turn)


@triton.jit
def _limit(number, real, count, most):
    """Return the lowest picked of up to 32,767 numbers in registers, and how many that equal it are picked."""
    lowest = tl.min(tl.where(real, number, 0xFFFFFFFF), 0).to(tl.int64)
    highest = tl.max(tl.where(real, number, 0), 0).to(tl.int64)
    exact = tl.zeros([], tl.int32)
    if count > most:
        while (lowest < highest) & (exact == 0):
            # Three parts in a turn, and two counts in one sum: it is the sums that take the time.
            part = tl.maximum((highest - lowest + 1) // 3, 1)
            one = lowest + part
            two = tl.minimum(one + part, highest)
            over_one, over_two = (number >= one.to(tl.uint32)).to(tl.int32), (number >= two.to(tl.uint32)).to(tl.int32)
            counts = tl.sum(tl.where(real, over_one + over_two * 65536, 0), 0)
            first, second = counts & 65535, counts >> 16
            exact = ((second == most) | (first == most)).to(tl.int32)
            lowest = tl.where(first >= most, one, lowest)
            lowest = tl.where((second >= most) & (first != most), two, lowest)
            highest = tl.where(second < most, two - 1, highest)
            highest = tl.where(first < most, one - 1, highest)
    limit = lowest.to(tl.uint32)
    return limit, most - tl.sum((real & (number > limit)).to(tl.int32), 0)


@triton.jit
def _limit_in_tiles(scores, length, most, tile: tl.constexpr):
    """Return the same for more than `most` scores, which are read again and again."""
    lowest, highest = tl.full([], 0, tl.int64), tl.full([], 0xFFFFFFFF, tl.int64)
    exact = tl.zeros([], tl.int32)
    while (lowest < highest) & (exact == 0):
        middle = lowest + (highest - lowest + 1) // 2
        found = _count(scores, length, middle, tile)
        exact = (found == most).to(tl.int32)
        lowest = tl.where(found >= most, middle, lowest)
        highest = tl.where(found >= most, highest, middle - 1)
    return lowest.to(tl.uint32), most - _count(scores, length, lowest + 1, tile)


@triton.jit
def _count(scores, length, least, tile: tl.constexpr):
    """Return how many scores are not below a number, an int64."""
    found = tl.zeros([tile], tl.int32)
    for begin in range(0, length, tile):
        key = begin + tl.arange(0, tile)
        real = key < length
        number = _ordered(tl.load(scores + key, mask=real, other=-float("inf")))
        found += (real & (number.to(tl.int64) >= least)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _taken(number, real, limit, left, equals, written):
    """Return which keys are above a limit or of the first `left` at it, their places, and both counts with them."""
    equal = real & (number == limit)
    rank = equals + tl.cumsum(equal.to(tl.int32), 0)
    taken = (real & (number > limit)) | (equal & (rank <= left))
    to = written + tl.cumsum(taken.to(tl.int32), 0) - 1
    return taken, to, equals + tl.sum(equal.to(tl.int32), 0), written + tl.sum(taken.to(tl.int32), 0)


@triton.jit
def _write(
    number, real, key, limit, left, equals, written, picks, table, listed, page: tl.constexpr, turn: tl.constexpr
):
    """Write the slots of the picked keys, and return both counts with these."""
    taken, to, equals, written = _taken(number, real, limit, left, equals, written)
    if turn == "last":
        slot = tl.load(listed + key, mask=taken, other=0)
    else:
        slot = tl.load(table + key // page, mask=taken, other=0) * page + key % page
    tl.store(picks + to, slot, mask=taken)
    return equals, written


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
