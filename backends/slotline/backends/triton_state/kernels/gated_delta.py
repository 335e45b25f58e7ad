"""The gated delta rule (Yang and others, arXiv 2412.06464, section 3): token by token, and in chunks for prompts.

In a chunk, token t corrects what the tokens before it have written: (1 + system) update = wanted, with a system
strictly below the diagonal. `prepare` inverts it, for all chunks side by side, and makes of it what does not depend on
the state (the WY form): update = own - reads @ S. `scan` walks over a request's chunks with the state S in registers.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.backends.triton_state.kernels.common import before_inputs, before_states, find_chunk, limit


@triton.jit
def _inverse_length(vectors, normed: tl.constexpr):
    """Return the inverse length of each row, 1 unless `normed`."""
    squares = tl.sum(vectors * vectors, 1)
    if normed:
        return tl.rsqrt(squares + 1e-6)
    return squares * 0.0 + 1.0


@triton.jit(do_not_specialize=["waits"])
def update(
    q,
    k,
    v,
    g,
    beta,
    state,
    out,
    slots,
    has_state,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    beta_token,
    s_slot,
    num_heads,
    group,
    waits,
    size_k: tl.constexpr,
    size_v: tl.constexpr,
    padded_k: tl.constexpr,
    block: tl.constexpr,
    normed: tl.constexpr,
    early: tl.constexpr,
    ahead: tl.constexpr,
):
    """Advance by one token of each request: token r is request r's.

    Grid: (blocks of a value head, value heads, requests).
    """
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    dim, dim_k = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, padded_k)
    inside, real = dim < size_v, dim_k < size_k
    if early:
        before_states(waits, ahead)
    slot = tl.load(slots + row).to(tl.int64)
    here = (dim_k < tl.where(slot >= 0, size_k, 0))[:, None] & inside[None, :]
    place = state + slot * s_slot + head * size_k * size_v + dim_k[:, None] * size_v + dim[None, :]
    known = here & (dim_k < limit(has_state + row, size_k))[:, None]
    s = tl.load(place, mask=known, other=0.0).to(tl.float32)
    if early:
        before_inputs(ahead)
    own = head // group
    query = tl.load(q + row * q_token + own * q_head + dim_k, mask=real, other=0.0).to(tl.float32)
    key = tl.load(k + row * k_token + own * k_head + dim_k, mask=real, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_token + head * v_head + dim, mask=inside, other=0.0).to(tl.float32)
    strength = tl.load(beta + row * beta_token + head).to(tl.float32)
    decay = tl.exp(tl.load(g + row * g_token + head))
    if normed:
        query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6)
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    s *= decay
    change = strength * (value - tl.sum(s * key[:, None], 0))
    s += key[:, None] * change[None, :]
    tl.store(place, s.to(state.dtype.element_ty), mask=here)
    y = tl.where(slot >= 0, tl.sum(s * query[:, None], 0) * scale, 0.0)
    tl.store(out + (row * num_heads + head) * size_v + dim, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "end", "num_tokens", "every"])
def prepare(
    q,
    k,
    v,
    g,
    beta,
    reads,
    own,
    scores,
    factors,
    starts,
    slots,
    first,
    end,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    beta_token,
    num_heads,
    group,
    num_tokens,
    every,
    size_k: tl.constexpr,
    size_v: tl.constexpr,
    padded_k: tl.constexpr,
    padded_v: tl.constexpr,
    chunk: tl.constexpr,
    normed: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute the inputs of `scan` for each chunk, except the state. Grid: (chunks, value heads).

    reads [tokens, heads, size_k], own [tokens, heads, size_v] and scores [tokens, heads, chunk] have the activation
    dtype. factors [3, heads, tokens] float32, with stride `every`, are log2 of the decay from the chunk's begin through
    each token, the factor of a query, and the factor of a key.
    """
    head = tl.program_id(1)
    row, number = find_chunk(tl.program_id(0), starts, first, end, chunk)
    begin = tl.load(starts + row).to(tl.int64)
    length = tl.load(starts + row + 1) - begin
    if (tl.load(slots + row) < 0) | (number * chunk >= length):
        return
    place = tl.arange(0, chunk)
    live = number * chunk + place < length
    at = begin + number * chunk + place
    dim_k, dim_v = tl.arange(0, padded_k), tl.arange(0, padded_v)
    wide_k, wide_v = live[:, None] & (dim_k < size_k)[None, :], live[:, None] & (dim_v < size_v)[None, :]
    of_key = head // group
    keys = tl.load(k + at[:, None] * k_token + of_key * k_head + dim_k[None, :], mask=wide_k, other=0.0)
    queries = tl.load(q + at[:, None] * q_token + of_key * q_head + dim_k[None, :], mask=wide_k, other=0.0)
    key_factor = _inverse_length(keys.to(tl.float32), normed)
    query_factor = _inverse_length(queries.to(tl.float32), normed) * scale
    decay = tl.cumsum(tl.load(g + at * g_token + head, mask=live, other=0.0) * 1.4426950408889634, 0)
    strength = tl.load(beta + at * beta_token + head, mask=live, other=0.0).to(tl.float32)
    of_head = head.to(tl.int64) * num_tokens + at
    tl.store(factors + of_head, decay, mask=live)
    tl.store(factors + every + of_head, query_factor, mask=live)
    tl.store(factors + 2 * every + of_head, key_factor, mask=live)

    between = tl.where(place[:, None] >= place[None, :], tl.exp2(decay[:, None] - decay[None, :]), 0.0)
    between *= key_factor[None, :]
    products = tl.dot(queries, tl.trans(keys), input_precision=precision)
    products *= between * query_factor[:, None]
    tl.store(
        scores + (at[:, None] * num_heads + head) * chunk + place[None, :],
        products.to(scores.dtype.element_ty),
        mask=live[:, None],
    )
    system = tl.dot(keys, tl.trans(keys), input_precision=precision) * between * (key_factor * strength)[:, None]
    system = tl.where(place[:, None] > place[None, :], system, 0.0)

    # The inverse of 1 + system, by blocks of 2, 4, 8 ..: of a block's halves the inverses are known, and what lies
    # between them goes in with one product on each side. No power of the system is taken, which could overflow.
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    inverse -= tl.where(place[:, None] // 2 == place[None, :] // 2, system, 0.0)
    for level in tl.static_range(1, 8):
        if (1 << level) < chunk:
            same = (place[:, None] >> (level + 1)) == (place[None, :] >> (level + 1))
            across = same & ((place[:, None] >> level) != (place[None, :] >> level))
            between_halves = tl.where(across, system, 0.0)
            left = tl.dot(inverse, between_halves, input_precision=precision)
            inverse -= tl.dot(left, inverse, input_precision=precision)

    here = at[:, None] * num_heads + head
    low = inverse.to(keys.dtype)
    values = tl.load(v + at[:, None] * v_token + head * v_head + dim_v[None, :], mask=wide_v, other=0.0)
    values = (values.to(tl.float32) * strength[:, None]).to(values.dtype)
    wanted = tl.dot(low, values, input_precision=precision)
    tl.store(own + here * size_v + dim_v[None, :], wanted.to(own.dtype.element_ty), mask=wide_v)
    keys = (keys.to(tl.float32) * (strength * key_factor * tl.exp2(decay))[:, None]).to(keys.dtype)
    read = tl.dot(low, keys, input_precision=precision)
    tl.store(reads + here * size_k + dim_k[None, :], read.to(reads.dtype.element_ty), mask=wide_k)


@triton.jit(do_not_specialize=["first", "num_tokens", "every"])
def scan(
    q,
    k,
    reads,
    own,
    scores,
    factors,
    state,
    out,
    starts,
    slots,
    has_state,
    first,
    q_token,
    q_head,
    k_token,
    k_head,
    s_slot,
    num_heads,
    group,
    num_tokens,
    every,
    size_k: tl.constexpr,
    size_v: tl.constexpr,
    padded_k: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute all chunks of a request. Grid: (blocks of a value head, value heads, requests from `first` on)."""
    head = tl.program_id(1)
    row = first + tl.program_id(2)
    begin = tl.load(starts + row).to(tl.int64)
    length = (tl.load(starts + row + 1) - begin).to(tl.int32)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (length <= 0):
        return
    dim, dim_k = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, padded_k)
    place = tl.arange(0, chunk)
    inside, real = dim < size_v, dim_k < size_k
    here = real[:, None] & inside[None, :]
    of_slot = state + slot * s_slot + head * size_k * size_v + dim_k[:, None] * size_v + dim[None, :]
    known = here & (dim_k < limit(has_state + row, size_k))[:, None]
    s = tl.load(of_slot, mask=known, other=0.0).to(tl.float32)
    q += begin * q_token + (head // group) * q_head
    k += begin * k_token + (head // group) * k_head
    reads += (begin * num_heads + head) * size_k
    own += (begin * num_heads + head) * size_v
    scores += (begin * num_heads + head) * chunk
    out += (begin * num_heads + head) * size_v
    factors += head.to(tl.int64) * num_tokens + begin
    for done in tl.range(0, length, chunk, num_stages=stages):
        at = done + place
        live = at < length
        before = tl.cast(done, tl.int64)
        wide_k, wide_v = live[:, None] & real[None, :], live[:, None] & inside[None, :]
        read = tl.load(
            reads + before * (num_heads * size_k) + (place[:, None] * (num_heads * size_k) + dim_k[None, :]),
            mask=wide_k,
            other=0.0,
        )
        wanted = tl.load(
            own + before * (num_heads * size_v) + (place[:, None] * (num_heads * size_v) + dim[None, :]),
            mask=wide_v,
            other=0.0,
        )
        seen = tl.load(
            scores + before * (num_heads * chunk) + (place[:, None] * (num_heads * chunk) + place[None, :]),
            mask=live[:, None],
            other=0.0,
        )
        queries = tl.load(q + before * q_token + (place[:, None] * q_token + dim_k[None, :]), mask=wide_k, other=0.0)
        keys = tl.load(k + before * k_token + (place[:, None] * k_token + dim_k[None, :]), mask=wide_k, other=0.0)
        decay = tl.load(factors + at, mask=live, other=0.0)
        total = tl.load(factors + tl.minimum(done + chunk, length) - 1)
        query_factor = tl.load(factors + every + at, mask=live, other=0.0)
        key_factor = tl.load(factors + 2 * every + at, mask=live, other=0.0)
        low = s.to(keys.dtype)
        change = wanted.to(tl.float32) - tl.dot(read, low, input_precision=precision)
        change = change.to(keys.dtype)
        y = tl.dot(queries, low, input_precision=precision) * (query_factor * tl.exp2(decay))[:, None]
        y = tl.dot(seen, change, y, input_precision=precision)
        tl.store(
            out + before * (num_heads * size_v) + (place[:, None] * (num_heads * size_v) + dim[None, :]),
            y.to(out.dtype.element_ty),
            mask=wide_v,
        )
        written = (keys.to(tl.float32) * (key_factor * tl.exp2(total - decay))[:, None]).to(keys.dtype)
        s = tl.dot(tl.trans(written), change, s * tl.exp2(total), input_precision=precision)
    tl.store(of_slot, s.to(state.dtype.element_ty), mask=here)
