"""Causal convolution over a request's tokens, with the last of those before in its slot."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.backends.triton_state.kernels.common import find_chunk, limit, silu


@triton.jit
def update(
    x,
    weight,
    bias,
    state,
    out,
    slots,
    has_state,
    x_token,
    s_slot,
    s_channel,
    s_tap,
    channels,
    width: tl.constexpr,
    block: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
):
    """One token of each request: token r is request r's. Grid: (requests, blocks of channels)."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    target = out + row * channels + channel
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        tl.store(target, tl.zeros([block], out.dtype.element_ty), mask=inside)
        return
    known = channel < limit(has_state + row, channels)
    state += slot * s_slot + channel * s_channel
    weight += channel * width
    acc = tl.zeros([block], tl.float32)
    if has_bias:
        acc = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(width - 1):
        value = tl.load(state + tap * s_tap, mask=known, other=0.0)
        if tap > 0:
            tl.store(state + (tap - 1) * s_tap, value, mask=inside)
        acc += value.to(tl.float32) * tl.load(weight + tap, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_token + channel, mask=inside, other=0.0)
    tl.store(state + (width - 2) * s_tap, value, mask=inside)
    acc += value.to(tl.float32) * tl.load(weight + width - 1, mask=inside, other=0.0).to(tl.float32)
    if has_silu:
        acc = silu(acc)
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def convolve(
    x,
    weight,
    bias,
    state,
    out,
    starts,
    slots,
    has_state,
    first,
    end,
    x_token,
    s_slot,
    s_channel,
    s_tap,
    channels,
    width: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
):
    """A chunk of a request's tokens. Grid: (chunks, blocks of channels); see `find_chunk`.

    Only a request's first chunk touches its state, also for the new one: no other program may be reading it.
    """
    row, number = find_chunk(tl.program_id(0), starts, first, end, chunk)
    begin = tl.load(starts + row).to(tl.int64)
    length = (tl.load(starts + row + 1) - begin).to(tl.int32)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (number * chunk >= length):
        return
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    known = channel < limit(has_state + row, channels)
    state += slot * s_slot + channel * s_channel
    weight += channel * width
    x += begin * x_token + channel
    out += begin * channels + channel
    token = number * chunk + tl.arange(0, chunk)
    acc = tl.zeros([chunk, block], tl.float32)
    if has_bias:
        acc += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(width):
        source = token + (tap + 1 - width)
        at = x[None, :] + source[:, None].to(tl.int64) * x_token
        value = tl.load(at, mask=((source >= 0) & (source < length))[:, None] & inside[None, :], other=0.0)
        acc += value.to(tl.float32) * tl.load(weight + tap, mask=inside, other=0.0).to(tl.float32)[None, :]
    if number == 0:
        for tap in tl.static_range(width - 1):
            column = token + tap  # of the state, where it is less than width - 1
            early = (column < width - 1)[:, None] & known[None, :]
            value = tl.load(state[None, :] + column[:, None] * s_tap, mask=early, other=0.0)
            acc += value.to(tl.float32) * tl.load(weight + tap, mask=inside, other=0.0).to(tl.float32)[None, :]
    if has_silu:
        acc = silu(acc)
    target = out[None, :] + token[:, None].to(tl.int64) * channels
    tl.store(target, acc.to(out.dtype.element_ty), mask=(token < length)[:, None] & inside[None, :])
    if number == 0:
        tl.debug_barrier()  # other threads of this program have read the old state by now
        for kept in tl.static_range(width - 1):
            place = length - (width - 1) + kept
            fresh = channel < tl.where(place >= 0, channels, 0)
            new = tl.load(x + place.to(tl.int64) * x_token, mask=fresh, other=0.0)
            old = tl.load(state + (length + kept) * s_tap, mask=known & (fresh == 0), other=0.0)
            tl.store(state + kept * s_tap, tl.where(fresh, new, old), mask=inside)
