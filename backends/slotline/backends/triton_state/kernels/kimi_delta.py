"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692, section 3), token by token, with the state in registers."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.backends.triton_state.kernels.common import limit


@triton.jit(do_not_specialize=["first"])
def recur(
    q,
    k,
    v,
    g,
    beta,
    state,
    out,
    starts,
    slots,
    has_state,
    first,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    s_slot,
    num_heads,
    size_k: tl.constexpr,
    size_v: tl.constexpr,
    padded_k: tl.constexpr,
    block: tl.constexpr,
    single: tl.constexpr,
):
    """Advance by all tokens of each request from `first` on. If `single`, token r is request r's.

    Grid: (blocks of a value head, heads, requests). Requests with slot -1 are left out.
    """
    head = tl.program_id(1)
    row = first + tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    begin, end = row, row + 1
    if not single:
        begin, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    if begin == end:
        return
    dim, dim_k = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, padded_k)
    inside, real = dim < size_v, dim_k < size_k
    here = real[:, None] & inside[None, :]
    place = state + slot * s_slot + head * size_k * size_v + dim_k[:, None] * size_v + dim[None, :]
    s = tl.load(place, mask=here & (dim_k < limit(has_state + row, size_k))[:, None], other=0.0).to(tl.float32)
    for token in range(begin, end):
        query = tl.load(q + token * q_token + head * q_head + dim_k, mask=real, other=0.0).to(tl.float32)
        key = tl.load(k + token * k_token + head * k_head + dim_k, mask=real, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_token + head * v_head + dim, mask=inside, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(g + token * g_token + head * g_head + dim_k, mask=real, other=0.0))
        strength = tl.load(beta + token * beta_token + head).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        s *= decay[:, None]
        change = strength * (value - tl.sum(s * key[:, None], 0))
        s += key[:, None] * change[None, :]
        y = tl.sum(s * query[:, None], 0)
        tl.store(out + (token * num_heads + head) * size_v + dim, y.to(out.dtype.element_ty), mask=inside)
    tl.store(place, s.to(state.dtype.element_ty), mask=here)
