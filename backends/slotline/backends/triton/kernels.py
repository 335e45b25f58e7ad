"""Paged attention in Triton: a kernel for decode, prefill and mixtures, one that merges split keys, one that stores.

A program handles a block of query tokens of one request and one KV head. Its rows are those tokens times the query
heads of the head's group, so keys and values are read once for all of them. It iterates over tiles of keys with an
online softmax in base 2 (Dao et al. 2022, algorithm 1, Milakov and Gimelshein 2018). If there are too few programs to
fill the device, the keys are divided into splits and merged afterwards (flash-decoding, Dao et al. 2023).

A common prefix adds one or several splits. All query tokens of the batch are treated as one request there, so that the
prefix is read once for them, and the requests' own splits begin after it (as in Juravsky et al. 2024, Hydragen).

Drafts in the form of a tree (Miao et al. 2024, SpecInfer) are a request's last query tokens and its last keys. Their
mask is read for the tiles with these keys.

Slots without a key of the request, freed blocks and the null block are masked before they are read.

Numbers that change from step to step are not specialised. Otherwise separate kernels for 1 and for multiples of 16
would be compiled long after the start, while requests wait.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = 1.4426950408889634


@triton.jit
def _find_request(block, starts, first, num_requests, block_q: tl.constexpr):
    """Return the request of a block of queries.

    Request r begins at block (tokens before) // block_q + (requests before).

    Each request has room for all its blocks. Unused blocks stay empty.
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
def _attend_tile(
    number,
    q,
    row_scale,
    keys,
    values,
    table,
    position,
    place,
    node,
    known,
    sees,
    depths,
    num_nodes,
    start,
    end,
    scale,
    soft_cap,
    window,
    slope,
    k_block,
    k_token,
    v_block,
    v_token,
    key_scales,
    value_scales,
    ks_block,
    ks_token,
    vs_block,
    vs_token,
    top,
    norm,
    acc,
    size: tl.constexpr,
    size_v: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    by_row: tl.constexpr,
    masked: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    has_slopes: tl.constexpr,
    causal: tl.constexpr,
    has_tree: tl.constexpr,
    exact: tl.constexpr,
    codes: tl.constexpr,
):
    """Compute one tile of keys: the new maximum, sum and output. Unless `masked`, all rows see all of its keys.

    `position` [block_m] is the position of a row's token in the cache, `place` its position in a text. They differ only
    for nodes of a tree, whose numbers are `node`, negative for other rows. `known` keys come before the nodes.
    """
    dim, dim_v = tl.arange(0, padded), tl.arange(0, padded_v)
    key = number * tile + tl.arange(0, tile)
    real = (key >= start) & (key < end)
    if masked:
        page_at = tl.load(table + key // page, mask=real, other=0).to(tl.int64)
    else:
        page_at = tl.load(table + key // page).to(tl.int64)
    inside = key % page
    per_byte: tl.constexpr = 2 if codes == "nibbles" else 1
    k_at = keys + (page_at * k_block + inside * k_token)[None, :] + (dim // per_byte)[:, None]
    v_at = values + (page_at * v_block + inside * v_token)[:, None] + (dim_v // per_byte)[None, :]
    if masked:
        k = tl.load(k_at, mask=real[None, :] & (dim < size)[:, None], other=0.0)
    elif size == padded:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=(dim < size)[:, None], other=0.0)
    if codes == "nibbles":
        k = _nibbles(k, (dim % 2)[:, None])
    if exact:  # noqa: SIM108 - the compiler drops one of two blocks, and compiles both sides of an expression
        scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee")
    else:
        scores = tl.dot(q, k.to(q.dtype))
    if codes != "":
        own = tl.load(key_scales + page_at * ks_block + inside * ks_token, mask=real, other=0.0)
        scores = scores * own[None, :]
    if by_row:
        scores = scores * row_scale[:, None]
    if has_cap:
        scores = capped(scores * scale, soft_cap)
        scale = 1.4426950408889634  # into base 2
    key_place = key
    if has_tree and masked and (has_window or has_slopes):
        is_node = real & (key >= known)
        key_place = tl.where(is_node, known + tl.load(depths + key - known, mask=is_node, other=0).to(tl.int32), key)
    if has_slopes:  # ALiBi, in base 2
        scores = scores * scale + slope[:, None] * (key_place[None, :] - place[:, None])
        scale = 1.0
    if masked:
        seen = real[None, :]
        if causal:
            seen = seen & (key[None, :] <= position[:, None])
        if has_tree:
            key_node = key - known
            drafted = real & (key_node >= 0)
            both = drafted[None, :] & ((node >= 0) & (node < num_nodes))[:, None]
            path = tl.load(sees + node[:, None] * num_nodes + key_node[None, :], mask=both, other=0)
            seen = seen & ((key_node < 0)[None, :] | (path != 0))
        if has_window:
            seen = seen & (key_place[None, :] > place[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
    best = tl.maximum(top, tl.max(scores, 1) * scale)
    safe = best
    if masked:
        safe = tl.where(best == -float("inf"), 0.0, best)  # a row that has seen nothing yet
    weights = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(top - safe)
    norm = norm * shrink + tl.sum(weights, 1)
    if masked:
        v = tl.load(v_at, mask=real[:, None] & (dim_v < size_v)[None, :], other=0.0)
    elif size_v == padded_v:
        v = tl.load(v_at)
    else:
        v = tl.load(v_at, mask=(dim_v < size_v)[None, :], other=0.0)
    if codes == "nibbles":
        v = _nibbles(v, (dim_v % 2)[None, :])
    if codes != "":
        # Weights times scales must stay within float16's range: relative to the tile's largest scale they do.
        own = tl.load(value_scales + page_at * vs_block + inside * vs_token, mask=real, other=0.0)
        most = tl.max(own, 0)
        most = tl.where(most > 0.0, most, 1.0)
        weights = weights * (own / most)[None, :]
        if exact:
            add = tl.dot(weights, v.to(tl.float32), input_precision="ieee")
        else:
            add = tl.dot(weights.to(q.dtype), v.to(q.dtype))
        acc = acc * shrink[:, None] + add * most
    elif exact:
        acc = acc * shrink[:, None] + tl.dot(weights, v.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None])
    return best, norm, acc


@triton.jit
def capped(scores, soft_cap):
    """Return soft_cap * tanh(scores / soft_cap), safe for large scores."""
    small = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(scores / soft_cap))
    size = soft_cap * (1.0 - small) / (1.0 + small)
    return tl.where(scores < 0, -size, size)


@triton.jit
def power_of_two(q):
    """Return the powers of two [rows] that bring rows of queries, float32, into float16's range without rounding."""
    largest = tl.max(tl.abs(q), 1)
    scale = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(scale > 0.0, scale, 1.0)


@triton.jit
def _nibbles(stored, high):
    """Return the codes from -7 to 7 in the lower halves of bytes, or in the upper ones where `high` is 1."""
    return ((stored.to(tl.int32) >> (high * 4)) & 15) - 8


@triton.jit
def _ask_for_tile(
    keys,
    values,
    table,
    number,
    end,
    k_block,
    k_token,
    v_block,
    v_token,
    size: tl.constexpr,
    size_v: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
):
    """Have the L2 cache fetch a tile's keys and values in front of `end`. What is newer there is fetched again."""
    key = number * tile + tl.arange(0, tile)
    real = key < end
    page_at = tl.load(table + key // page, mask=real, other=0).to(tl.int64)
    inside = key % page
    _ask(keys + page_at * k_block + inside * k_token, real, size)
    _ask(values + page_at * v_block + inside * v_token, real, size_v)


@triton.jit
def _ask(rows, real, size: tl.constexpr):
    """Have the L2 cache fetch `size` numbers at each address [n] that is real, and wait for nothing."""
    num_bytes: tl.constexpr = size * rows.dtype.element_ty.primitive_bitwidth // 8
    if num_bytes % 16 == 0:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
            "=r,l,r,r",
            [rows, real.to(tl.int32), tl.full(real.shape, num_bytes, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(
    do_not_specialize=[
        "num_nodes",
        "nodes_row",
        "first",
        "num_requests",
        "num_splits",
        "first_part",
        "num_parts",
        "lse_head",
    ]
)
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
    slopes,
    nodes,
    sees,
    depths,
    num_nodes,
    nodes_row,
    first,
    num_requests,
    prefix,
    segment_tokens,
    key_scale,
    value_scale,
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
    ks_block,
    ks_token,
    ks_head,
    vs_block,
    vs_token,
    vs_head,
    o_token,
    o_head,
    lse_head,
    table_row,
    num_heads,
    num_splits,
    first_part,
    num_parts,
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
    has_slopes: tl.constexpr,
    has_scales: tl.constexpr,
    causal: tl.constexpr,
    has_tree: tl.constexpr,
    split: tl.constexpr,
    cascade: tl.constexpr,
    exact: tl.constexpr,
    codes: tl.constexpr,
    peel: tl.constexpr,
    early: tl.constexpr,
):
    """Compute attention of one block of queries, one KV head and one split of the keys.

    Grid: (blocks of queries times KV heads, splits), with the heads of a block adjacent. Programs begin in this order,
    so the blocks with the most keys, which come first, begin first for all heads. The kernel handles requests `first`
    .. `num_requests`. `single` means that each has one query token. Unsplit results go to out [tokens, heads, size_v]
    and lse [heads, tokens]. Split results, unnormalised, go to the parts from `first_part` on of parts [tokens, heads,
    num_parts, padded_v] and part_norms [tokens, heads, num_parts, 2] (maximum, sum). `scale` is for base 2 unless
    capped. `cascade` is "" for all keys, "prefix" for the first `prefix` keys and the tokens of all requests, "rest"
    for the keys after them. "segments" is for those of groups of requests, which take the place of requests: `prefix`
    [segments, 4] as in `PrefixGroups`, and the query tokens that `segment_tokens` has from each one's start on. "own"
    is for the keys of each request from `prefix` [requests] on. `has_tree`: the last nodes [requests] query tokens of
    each request are the first nodes of a tree with the mask sees [num_nodes, num_nodes] and depths [num_nodes].
    `nodes_row` is num_nodes if there is one for each request, else 0. `slopes` [heads] are ALiBi's, if `has_slopes`.
    `codes` is "bytes" or "nibbles" for keys and values in codes with a scale for each token and KV head, "" for all
    others. `peel` handles tiles without a mask in a separate loop. `early`: the next kernel may start, and this one
    waits for the previous one, which writes the queries and the newest keys and values. Positions of requests and pages
    are read before the wait. They are written before a step's first kernel, the lookup of embeddings, which does not
    start early.
    """
    if early:
        gdc_launch_dependents()
    kv_heads = num_heads // group
    head, turn, index = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads, tl.program_id(1)
    request, block = first + turn, 0
    if cascade == "prefix":
        request, block = first, turn
    elif not single:
        # The last blocks of a prompt see most keys: they begin first, so that none is left over at the end.
        last = tl.num_programs(0) // kv_heads - 1
        request, block = _find_request(last - turn, starts, first, num_requests, block_q)
    begin = tl.load(starts + request)
    if cascade == "prefix":
        query_len = tl.load(starts + num_requests) - begin
        length = tl.load(prefix)
    else:
        query_len = tl.load(starts + request + 1) - begin
        if cascade == "segments":  # noqa: SIM108 - as above
            length = tl.load(prefix + request * 4 + 2)
        else:
            length = tl.load(seq_lens + request)
    if block * block_q >= query_len:
        if early:
            gdc_wait()  # the next kernel assumes that everything before this one has ended
        return
    row = tl.arange(0, block_m)
    token = block * block_q + row // group
    query_head = head * group + row % group
    used = (row < block_q * group) & (token < query_len)
    position = length - query_len + token  # [block_m]

    end = length
    if causal:
        end = tl.minimum(length, length - query_len + (block + 1) * block_q)
    start = 0
    known, node, place = length, position, position
    first_place = length - query_len + block * block_q
    if has_tree:
        known = length - tl.load(nodes + request)
        sees += request.to(tl.int64) * nodes_row * num_nodes
        depths += request.to(tl.int64) * nodes_row
        node = position - known
        first_place = tl.minimum(first_place, known)
        if has_window or has_slopes:
            drafted = (node >= 0) & (node < num_nodes)
            place = tl.where(drafted, known + tl.load(depths + node, mask=drafted, other=0).to(tl.int32), position)
    if has_window:
        start = tl.maximum(0, first_place - window + 1)
    if cascade == "rest":
        start = tl.minimum(tl.load(prefix), end)  # a padded request ends before the prefix does
    if cascade == "own":
        start = tl.minimum(tl.load(prefix + request), end)
    if cascade == "segments":
        start = tl.load(prefix + request * 4 + 1)
        first_part += tl.load(prefix + request * 4 + 3) * num_splits
        request = tl.load(prefix + request * 4)
    first_tile = start // tile
    last_tile = tl.cdiv(end, tile)
    if split:
        each = tl.cdiv(last_tile - first_tile, num_splits)
        first_tile += index * each
        last_tile = tl.minimum(last_tile, first_tile + each)

    table += request.to(tl.int64) * table_row
    keys += head * k_head
    values += head * v_head
    key_scales, value_scales = key_scale, value_scale
    if codes != "":
        key_scales += head * ks_head
        value_scales += head * vs_head
    if early:
        if split:
            _ask_for_tile(
                keys,
                values,
                table,
                first_tile,
                end,
                k_block,
                k_token,
                v_block,
                v_token,
                (size + 1) // 2 if codes == "nibbles" else size,
                (size_v + 1) // 2 if codes == "nibbles" else size_v,
                page,
                tile,
            )
        gdc_wait()

    dim, dim_v = tl.arange(0, padded), tl.arange(0, padded_v)
    where = (begin + token).to(tl.int64)
    if cascade == "segments":
        where = tl.load(segment_tokens + where, mask=used, other=0).to(tl.int64)
    at = where * q_token + query_head * q_head
    q = tl.load(query + at[:, None] + dim[None, :], mask=used[:, None] & (dim < size)[None, :], other=0.0)

    # Eight-bit keys and values become float16 at no loss and faster than bfloat16, so the products are in float16 then.
    # Queries are brought into its range row by row, by a power of two, which rounds nothing.
    by_row: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8 and not exact
    row_scale = scale
    if by_row:
        q = q.to(tl.float32)
        row_scale = power_of_two(q)
        q = (q / row_scale[:, None]).to(tl.float16)
    if has_scales:
        scale = scale * tl.load(key_scale)
    slope = scale
    if has_slopes:
        slope = tl.load(slopes + query_head, mask=used, other=0.0) * 1.4426950408889634

    top = tl.full([block_m], -float("inf"), tl.float32)
    norm = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, padded_v], tl.float32)
    # Tiles that every query of the block sees whole need no mask; others lie before them, if at all, and behind.
    whole_start, whole_end = start, end
    if causal:
        whole_end = tl.minimum(end, length - query_len + block * block_q + 1)
    if has_tree:
        whole_end = tl.minimum(whole_end, known)
    if has_window:
        whole_start = tl.maximum(start, length - query_len + (block + 1) * block_q - window)
    whole_first = tl.minimum(tl.maximum(tl.cdiv(whole_start, tile), first_tile), last_tile)
    whole_last = tl.minimum(tl.maximum(whole_end // tile, whole_first), last_tile)
    # Else the first tile is whole.
    before: tl.constexpr = has_window or cascade == "rest" or cascade == "own" or cascade == "segments"
    for part in tl.static_range((0 if before else 1) if peel else 2, 3):
        begin_tile, end_tile = first_tile, last_tile
        if peel:
            if part == 0:
                end_tile = whole_first
            elif part == 1:
                begin_tile, end_tile = whole_first, whole_last
            else:
                begin_tile = whole_last
        for number in tl.range(begin_tile, end_tile):
            top, norm, acc = _attend_tile(
                number,
                q,
                row_scale,
                keys,
                values,
                table,
                position,
                place,
                node,
                known,
                sees,
                depths,
                num_nodes,
                start,
                end,
                scale,
                soft_cap,
                window,
                slope,
                k_block,
                k_token,
                v_block,
                v_token,
                key_scales,
                value_scales,
                ks_block,
                ks_token,
                vs_block,
                vs_token,
                top,
                norm,
                acc,
                size,
                size_v,
                padded,
                padded_v,
                page,
                tile,
                by_row,
                masked=not (peel and part == 1),
                has_window=has_window,
                has_cap=has_cap,
                has_slopes=has_slopes,
                causal=causal,
                has_tree=has_tree,
                exact=exact,
                codes=codes,
            )

    if has_scales:
        acc = acc * tl.load(value_scale)
    if split:
        slot = (where * num_heads + query_head) * num_parts + first_part + index
        tl.store(parts + slot[:, None] * padded_v + dim_v[None, :], acc, mask=used[:, None])
        tl.store(part_norms + slot * 2, top, mask=used)
        tl.store(part_norms + slot * 2 + 1, norm, mask=used)
        return
    write_results(
        top, norm, acc, out, lse, sinks, where, query_head, used, o_token, o_head, lse_head, size_v, padded_v, has_sinks
    )


@triton.jit
def write_results(
    top,
    norm,
    acc,
    out,
    lse,
    sinks,
    token,
    head,
    used,
    o_token,
    o_head,
    lse_head,
    size_v: tl.constexpr,
    padded_v: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Write the output and the LSE of rows that had all their keys. `token` and `head` are those of each row."""
    dim = tl.arange(0, padded_v)
    if has_sinks:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        best = tl.maximum(top, sink)
        shrink = tl.exp2(top - best)
        norm = norm * shrink + tl.exp2(sink - best)
        acc = acc * shrink[:, None]
        top = best
    result = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
    to = out + (token * o_token + head * o_head)[:, None] + dim[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=used[:, None] & (dim < size_v)[None, :])
    tl.store(lse + head.to(tl.int64) * lse_head + token, (top + tl.log2(norm)) * 0.6931471805599453, mask=used)


@triton.jit(do_not_specialize=["first_token", "num_splits", "own_splits", "level_splits", "lse_head"])
def join(
    out,
    lse,
    parts,
    part_norms,
    sinks,
    depths,
    own_splits,
    level_splits,
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
    has_depths: tl.constexpr,
    early: tl.constexpr,
):
    """Join the splits of one token and query head. Grid: (tokens from `first_token` on, heads).

    `has_depths`: a token has `own_splits` splits, and `level_splits` for each of its depths [tokens] segments.
    """
    if early:
        gdc_launch_dependents()
        gdc_wait()
    token, head = (first_token + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    slot = (token * num_heads + head) * num_splits
    index, dim = tl.arange(0, padded_splits), tl.arange(0, padded_v)
    real = index < num_splits
    if has_depths:
        real = index < own_splits + tl.load(depths + token) * level_splits
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
    key_scale,
    value_scale,
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
    most: tl.constexpr,
    has_scales: tl.constexpr,
):
    """Write one token's key and value, all heads, to its slot. Slot -1 is skipped. Grid: (tokens,).

    `most` is the largest finite value of an eight-bit cache, 0 for other caches.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, inside = slot // page, slot % page
    head = tl.arange(0, padded_heads)[:, None]
    dim, dim_v = tl.arange(0, padded)[None, :], tl.arange(0, padded_v)[None, :]
    here = (head < num_heads) & (dim < size)
    new = tl.load(key + token * key_token + head * key_head + dim, mask=here)
    if most > 0:
        new = new.to(tl.float32)
        if has_scales:
            new = new / tl.load(key_scale)
        new = tl.minimum(tl.maximum(new, -most), most)
    tl.store(keys + block * k_block + inside * k_token + head * k_head + dim, new.to(keys.dtype.element_ty), mask=here)
    here = (head < num_heads) & (dim_v < size_v)
    new = tl.load(value + token * value_token + head * value_head + dim_v, mask=here)
    if most > 0:
        new = new.to(tl.float32)
        if has_scales:
            new = new / tl.load(value_scale)
        new = tl.minimum(tl.maximum(new, -most), most)
    target = values + block * v_block + inside * v_token + head * v_head + dim_v
    tl.store(target, new.to(values.dtype.element_ty), mask=here)


@triton.jit
def encode(
    key,
    value,
    keys,
    values,
    slots,
    key_scales,
    value_scales,
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
    ks_block,
    ks_token,
    ks_head,
    vs_block,
    vs_token,
    vs_head,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    size_v: tl.constexpr,
    padded_heads: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    page: tl.constexpr,
    most: tl.constexpr,
    codes: tl.constexpr,
):
    """Write one token's key and value, all heads, to its slot as codes and a scale for each head. Grid: (tokens,).

    Slot -1 is skipped. `most` is the largest code. `codes` is as in `attend`.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, inside = slot // page, slot % page
    head = tl.arange(0, padded_heads)
    _encode(
        key + token * key_token + head * key_head,
        keys + block * k_block + inside * k_token + head * k_head,
        key_scales + block * ks_block + inside * ks_token + head * ks_head,
        head < num_heads,
        size,
        padded,
        most,
        codes,
    )
    _encode(
        value + token * value_token + head * value_head,
        values + block * v_block + inside * v_token + head * v_head,
        value_scales + block * vs_block + inside * vs_token + head * vs_head,
        head < num_heads,
        size_v,
        padded_v,
        most,
        codes,
    )


@triton.jit
def _encode(
    vectors, stored, scales, real, size: tl.constexpr, padded: tl.constexpr, most: tl.constexpr, codes: tl.constexpr
):
    """Write the vectors at addresses [heads] that are real as codes and scales to the addresses of theirs."""
    if codes == "nibbles":
        dim = tl.arange(0, padded // 2)[None, :]
        here = real[:, None] & (dim * 2 < size)
        low = tl.load(vectors[:, None] + dim * 2, mask=here, other=0.0).to(tl.float32)
        high = tl.load(vectors[:, None] + dim * 2 + 1, mask=here & (dim * 2 + 1 < size), other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        scale = tl.maximum(tl.div_rn(largest, most), 1.1754943508222875e-38)
        byte = _rounded(low, scale, most) + 8 + (_rounded(high, scale, most) + 8) * 16
        tl.store(stored[:, None] + dim, byte.to(tl.uint8), mask=here)
    else:
        dim = tl.arange(0, padded)[None, :]
        here = real[:, None] & (dim < size)
        new = tl.load(vectors[:, None] + dim, mask=here, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(new), 1), most), 1.1754943508222875e-38)
        if stored.dtype.element_ty == tl.int8:
            tl.store(stored[:, None] + dim, _rounded(new, scale, most).to(tl.int8), mask=here)
        else:
            new = tl.minimum(tl.maximum(tl.div_rn(new, scale[:, None]), -most), most)
            tl.store(stored[:, None] + dim, new.to(stored.dtype.element_ty), mask=here)
    tl.store(scales, scale, mask=real)


@triton.jit
def _rounded(vectors, scale, most: tl.constexpr):
    """Return vectors [heads, size] over scales [heads] as int32 codes, rounded to nearest even."""
    magic: tl.constexpr = 12582912.0  # 1.5 * 2 ** 23, from which on float32 has no fractions
    exact = tl.minimum(tl.maximum(tl.div_rn(vectors, scale[:, None]), -most), most)
    return ((exact + magic) - magic).to(tl.int32)
