"""Multi-head latent attention in Triton: paged attention over latents that are key and value of all heads.

All query heads read the same keys, so a program handles any `block_m` of a request's rows, which are its query tokens
times its heads, and reads each tile of latents once for scores and values. The rest is the online softmax of
`kernels.attend`, with keys divided into splits that `kernels.join` merges. Slots without a key of the request are
masked before they are read. A mask is cheap compared with products of this size, so all tiles have one.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _find_request(block, starts, first, num_requests, heads, block_m: tl.constexpr):
    """Return the request of a block of rows. Request r begins at block (rows before) // block_m + (requests before).

    Each request has room for all its blocks. Unused blocks stay empty.
    """
    offset = tl.load(starts + first)
    low, high = first, num_requests
    while low + 1 < high:
        middle = (low + high) // 2
        begin = (tl.load(starts + middle) - offset) * heads // block_m + middle - first
        if begin <= block:
            low = middle
        else:
            high = middle
    begin = (tl.load(starts + low) - offset) * heads // block_m + low - first
    return low, block - begin


@triton.jit
def on_path(sees, node, key_node, real, num_nodes):
    """Return which keys a row may see for the tree: `key_node` and `node` are numbers of nodes, negative for others.

    Both are broadcast with `real`, which says which keys are read. Other rows see all keys, and nodes all other keys.
    """
    among = real & (key_node >= 0) & (node >= 0) & (node < num_nodes)
    return tl.load(sees + node * num_nodes + key_node, mask=among, other=1) != 0


@triton.jit(do_not_specialize=["num_nodes", "nodes_row", "first", "num_requests", "lse_head", "num_splits"])
def attend_latents(
    query,
    latents,
    out,
    lse,
    parts,
    part_norms,
    table,
    seq_lens,
    starts,
    nodes,
    sees,
    num_nodes,
    nodes_row,
    first,
    num_requests,
    scale,
    q_token,
    q_head,
    k_block,
    k_token,
    o_token,
    o_head,
    lse_head,
    table_row,
    num_splits,
    heads: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    padded: tl.constexpr,
    padded_rope: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    block_m: tl.constexpr,
    single: tl.constexpr,
    has_tree: tl.constexpr,
    split: tl.constexpr,
    exact: tl.constexpr,
):
    """Compute one block of rows and one split of the keys. Grid: (blocks of rows, splits).

    The kernel handles requests `first` .. `num_requests`. `single` means that each has one query token. Unsplit results
    go to out [tokens, heads, rank] and lse [heads, tokens]. Split results, unnormalised, go to parts [tokens, heads,
    splits, padded] and part_norms [tokens, heads, splits, 2] (maximum, sum). `scale` is for base 2. `has_tree`: the
    last nodes [requests] query tokens of each request are the first nodes of a tree, as in `kernels.attend`.
    """
    index = tl.program_id(1)
    if single:
        each: tl.constexpr = (heads + block_m - 1) // block_m
        request, block = first + tl.program_id(0) // each, tl.program_id(0) % each
    else:
        # The last blocks of a prompt see most keys: they begin first, so that none is left over at the end.
        last = tl.num_programs(0) - 1
        request, block = _find_request(last - tl.program_id(0), starts, first, num_requests, heads, block_m)
    begin = tl.load(starts + request)
    query_len = tl.load(starts + request + 1) - begin
    length = tl.load(seq_lens + request)
    if block * block_m >= query_len * heads:
        return
    row = block * block_m + tl.arange(0, block_m)
    token, head = row // heads, row % heads
    used = token < query_len
    position = length - query_len + token  # [block_m]
    known = length
    if has_tree:
        known = length - tl.load(nodes + request)
        sees += request.to(tl.int64) * nodes_row * num_nodes
    dim, dim_rope = tl.arange(0, padded), tl.arange(0, padded_rope)
    at = query + ((begin + token).to(tl.int64) * q_token + head * q_head)[:, None]
    q = tl.load(at + dim[None, :], mask=used[:, None] & (dim < rank)[None, :], other=0.0)
    q_rope = q
    if rope > 0:
        q_rope = tl.load(at + rank + dim_rope[None, :], mask=used[:, None] & (dim_rope < rope)[None, :], other=0.0)

    end = tl.minimum(length, length - query_len + (block * block_m + block_m - 1) // heads + 1)
    first_tile, last_tile = 0, tl.cdiv(end, tile)
    if split:
        share = tl.cdiv(last_tile, num_splits)
        first_tile = index * share
        last_tile = tl.minimum(last_tile, first_tile + share)

    table += request.to(tl.int64) * table_row
    top = tl.full([block_m], -float("inf"), tl.float32)
    norm = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, padded], tl.float32)
    scalar: tl.constexpr = page % tile == 0  # a tile lies in one block
    own = 0
    if scalar and first_tile < last_tile:
        own = tl.load(table + first_tile * tile // page)
    for number in tl.range(first_tile, last_tile):
        following = 0
        if scalar:  # read an iteration ahead, so that the latents' loads wait for nothing
            following = tl.load(table + tl.minimum(number + 1, last_tile - 1) * tile // page)
        key = number * tile + tl.arange(0, tile)
        real = key < end
        if scalar:  # noqa: SIM108 - the compiler drops one of two blocks, and compiles both sides of an expression
            place = own.to(tl.int64)
        else:
            place = tl.load(table + key // page, mask=real, other=0).to(tl.int64)
        row_at = latents + (place * k_block + (key % page) * k_token)[:, None]
        latent = tl.load(row_at + dim[None, :], mask=real[:, None] & (dim < rank)[None, :], other=0.0).to(q.dtype)
        if exact:  # noqa: SIM108 - as above
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
        seen = real[None, :] & (key[None, :] <= position[:, None])
        if has_tree:
            seen = seen & on_path(sees, (position - known)[:, None], (key - known)[None, :], seen, num_nodes)
        scores = tl.where(seen, scores, -float("inf"))
        best = tl.maximum(top, tl.max(scores, 1) * scale)
        safe = tl.where(best == -float("inf"), 0.0, best)  # a row that has seen nothing yet
        weights = tl.exp2(scores * scale - safe[:, None])
        shrink = tl.exp2(top - safe)
        norm = norm * shrink + tl.sum(weights, 1)
        if exact:
            acc = acc * shrink[:, None] + tl.dot(weights, latent, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(q.dtype), latent, acc * shrink[:, None])
        top, own = best, following

    where = (begin + token).to(tl.int64)
    if split:
        slot = (where * heads + head) * num_splits + index
        tl.store(parts + slot[:, None] * padded + dim[None, :], acc, mask=used[:, None])
        tl.store(part_norms + slot * 2, top, mask=used)
        tl.store(part_norms + slot * 2 + 1, norm, mask=used)
        return
    result = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
    o_at = where * o_token + head * o_head
    tl.store(
        out + o_at[:, None] + dim[None, :],
        result.to(out.dtype.element_ty),
        mask=used[:, None] & (dim < rank)[None, :],
    )
    tl.store(lse + head.to(tl.int64) * lse_head + where, (top + tl.log2(norm)) * 0.6931471805599453, mask=used)


@triton.jit
def store_latents(
    key,
    latents,
    slots,
    key_token,
    k_block,
    k_token,
    size: tl.constexpr,
    padded: tl.constexpr,
    page: tl.constexpr,
):
    """Write one token's latent to its slot. Slot -1 is skipped. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    dim = tl.arange(0, padded)
    new = tl.load(key + token * key_token + dim, mask=dim < size)
    at = latents + slot // page * k_block + slot % page * k_token
    tl.store(at + dim, new.to(latents.dtype.element_ty), mask=dim < size)
