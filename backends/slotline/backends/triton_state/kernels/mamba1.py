"""The selective scan of Mamba (Gu and Dao, arXiv 2312.00752, section 3): a decay for each channel and state."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.backends.triton_state.kernels.common import limit, silu, time_step


@triton.jit
def update(
    x,
    dt,
    rate,
    b,
    c,
    skip,
    dt_bias,
    z,
    state,
    out,
    slots,
    has_state,
    low,
    high,
    x_token,
    dt_token,
    b_token,
    c_token,
    z_token,
    s_slot,
    channels,
    size: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    has_skip: tl.constexpr,
    has_bias: tl.constexpr,
    has_gate: tl.constexpr,
    has_softplus: tl.constexpr,
    has_limit: tl.constexpr,
):
    """One token of each request: token r is request r's. Grid: (blocks of channels, requests)."""
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.arange(0, padded)
    inside = channel < channels
    target = out + row * channels + channel
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        tl.store(target, tl.zeros([block], out.dtype.element_ty), mask=inside)
        return
    here = inside[:, None] & (column < size)[None, :]
    place = channel[:, None] * size + column[None, :]
    state += slot * s_slot
    known = here & (column < limit(has_state + row, size))[None, :]
    h = tl.load(state + place, mask=known, other=0.0).to(tl.float32)
    d = tl.load(dt + row * dt_token + channel, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        d += tl.load(dt_bias + channel, mask=inside, other=0.0)
    d = time_step(d, low, high, has_softplus, has_limit)
    value = tl.load(x + row * x_token + channel, mask=inside, other=0.0).to(tl.float32)
    rates = tl.load(rate + place, mask=here, other=0.0)
    added = tl.load(b + row * b_token + column, mask=column < size, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_token + column, mask=column < size, other=0.0).to(tl.float32)
    h = tl.exp(d[:, None] * rates) * h + (d * value)[:, None] * added[None, :]
    tl.store(state + place, h.to(state.dtype.element_ty), mask=here)
    y = tl.sum(h * read[None, :], 1)
    if has_skip:
        y += tl.load(skip + channel, mask=inside, other=0.0) * value
    if has_gate:
        y *= silu(tl.load(z + row * z_token + channel, mask=inside, other=0.0).to(tl.float32))
    tl.store(target, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _then(decay, added, next_decay, next_added):
    """One step of h -> decay * h + added after another."""
    return decay * next_decay, next_decay * added + next_added


@triton.jit
def scan(
    x,
    dt,
    rate,
    b,
    c,
    skip,
    dt_bias,
    z,
    state,
    out,
    starts,
    slots,
    has_state,
    first,
    low,
    high,
    x_token,
    dt_token,
    b_token,
    c_token,
    z_token,
    s_slot,
    channels,
    size: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
    has_skip: tl.constexpr,
    has_bias: tl.constexpr,
    has_gate: tl.constexpr,
    has_softplus: tl.constexpr,
    has_limit: tl.constexpr,
):
    """All tokens of a request, chunk after chunk; in a chunk the states of all tokens by an associative scan.

    Grid: (blocks of channels, requests from `first` on).
    """
    row = first + tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    begin = tl.load(starts + row).to(tl.int64)
    length = (tl.load(starts + row + 1) - begin).to(tl.int32)
    if (slot < 0) | (length <= 0):
        return
    channel = tl.program_id(0) * block + tl.arange(0, block)
    column, token = tl.arange(0, padded), tl.arange(0, chunk)
    inside, real = channel < channels, column < size
    here = inside[:, None] & real[None, :]
    place = channel[:, None] * size + column[None, :]
    state += slot * s_slot
    known = here & (column < limit(has_state + row, size))[None, :]
    h = tl.load(state + place, mask=known, other=0.0).to(tl.float32)
    rates = tl.load(rate + place, mask=here, other=0.0)
    if has_bias:
        bias = tl.load(dt_bias + channel, mask=inside, other=0.0)
    if has_skip:
        through = tl.load(skip + channel, mask=inside, other=0.0)
    for done in range(0, length, chunk):
        live = done + token < length
        at = begin + done
        both = live[:, None] & inside[None, :]
        d = tl.load(dt + at * dt_token + (token[:, None] * dt_token + channel[None, :]), mask=both, other=0.0).to(
            tl.float32
        )
        if has_bias:
            d += bias[None, :]
        d = tl.where(both, time_step(d, low, high, has_softplus, has_limit), 0.0)  # what is not there changes nothing
        value = tl.load(x + at * x_token + (token[:, None] * x_token + channel[None, :]), mask=both, other=0.0).to(
            tl.float32
        )
        wanted = live[:, None] & real[None, :]
        added = tl.load(b + at * b_token + (token[:, None] * b_token + column[None, :]), mask=wanted, other=0.0).to(
            tl.float32
        )
        read = tl.load(c + at * c_token + (token[:, None] * c_token + column[None, :]), mask=wanted, other=0.0).to(
            tl.float32
        )
        decay = tl.exp(d[:, :, None] * rates[None, :, :])
        decay, states = tl.associative_scan((decay, (d * value)[:, :, None] * added[:, None, :]), 0, _then)
        states += decay * h[None, :, :]
        y = tl.sum(states * read[:, None, :], 2)
        h = tl.sum(tl.where((token == chunk - 1)[:, None, None], states, 0.0), 0)
        if has_skip:
            y += through[None, :] * value
        if has_gate:
            y *= silu(
                tl.load(z + at * z_token + (token[:, None] * z_token + channel[None, :]), mask=both, other=0.0).to(
                    tl.float32
                )
            )
        target = out + at * channels + (token[:, None] * channels + channel[None, :])
        tl.store(target, y.to(out.dtype.element_ty), mask=both)
    tl.store(state + place, h.to(state.dtype.element_ty), mask=here)
