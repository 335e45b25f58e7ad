"""Causal convolution over a request's tokens, with the last of those before in its slot."""

# mypy: ignore-errors
# ruff: noqa: RUF005 - the compiler knows tuples that are joined, not such that are unpacked

from __future__ import annotations

import triton
import triton.language as tl

from slotline.backends.triton_state.kernels.common import before_inputs, before_states, find_chunk, limit, silu


@triton.jit(do_not_specialize=["waits"])
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
    waits,
    width: tl.constexpr,
    block: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
    early: tl.constexpr,
    ahead: tl.constexpr,
):
    """One token of each request: token r is request r's. Grid: (requests, blocks of channels)."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    if early:
        before_states(waits, ahead)
    slot = tl.load(slots + row).to(tl.int64)
    kept = channel < tl.where(slot >= 0, channels, 0)
    known = kept & (channel < limit(has_state + row, channels))
    state += slot * s_slot + channel * s_channel
    window = ()
    for tap in tl.static_range(width - 1):
        window = window + (tl.load(state + tap * s_tap, mask=known, other=0.0),)
    if early:
        before_inputs(ahead)
    window = window + (tl.load(x + row * x_token + channel, mask=inside, other=0.0),)
    acc = tl.zeros([block], tl.float32)
    if has_bias:
        acc = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(width):
        factor = tl.load(weight + channel * width + tap, mask=inside, other=0.0).to(tl.float32)
        acc += window[tap].to(tl.float32) * factor
    if has_silu:
        acc = silu(acc)
    acc = tl.where(slot >= 0, acc, 0.0)
    tl.store(out + row * channels + channel, acc.to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # whichever thread loaded a number, it has it by now
    for tap in tl.static_range(width - 1):
        tl.store(state + tap * s_tap, window[tap + 1], mask=kept)


@triton.jit
def _number(words, index: tl.constexpr, dtype: tl.constexpr):
    """Number `index` of 16-bit numbers that lie four to a word, in float32."""
    return (words[index // 4] >> (index % 4 * 16)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _bits(words, index: tl.constexpr, place: tl.constexpr):
    """The bits of number `index`, at `place` of another word."""
    return ((words[index // 4] >> (index % 4 * 16)) & 0xFFFF) << (place * 16)


@triton.jit(do_not_specialize=["waits"])
def update_words(
    x,
    weight,
    bias,
    state,
    out,
    slots,
    has_state,
    x_token,
    s_slot,
    words,
    waits,
    width: tl.constexpr,
    block: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
    early: tl.constexpr,
    ahead: tl.constexpr,
):
    """As `update` with numbers of 16 bits, of which four channels' are read at a time: their taps are whole words.

    With a load for each number it is the loads that take the time, not the bytes. `words`, `x_token` and `s_slot`
    count words, of a token's channels and between tokens and slots. Grid: (requests, blocks of words).
    """
    dtype: tl.constexpr = out.dtype.element_ty
    whole: tl.constexpr = tl.pointer_type(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * block + tl.arange(0, block)
    inside = word < words
    if early:
        before_states(waits, ahead)
    slot = tl.load(slots + row).to(tl.int64)
    kept = word < tl.where(slot >= 0, words, 0)
    known = kept & (word < limit(has_state + row, words))
    taps = state.to(whole, bitcast=True) + slot * s_slot + word * (width - 1)
    window, factors = (), ()
    for tap in tl.static_range(width - 1):
        window = window + (tl.load(taps + tap, mask=known, other=0),)
    if early:
        before_inputs(ahead)
    new = (tl.load(x.to(whole, bitcast=True) + row * x_token + word, mask=inside, other=0),)
    factors_at = weight.to(whole, bitcast=True) + word * width
    for tap in tl.static_range(width):
        factors = factors + (tl.load(factors_at + tap, mask=inside, other=0),)
    if has_bias:
        offsets = (tl.load(bias.to(whole, bitcast=True) + word, mask=inside, other=0),)
    result = tl.zeros([block], tl.int64)
    for channel in tl.static_range(4):
        acc = _number(new, channel, dtype) * _number(factors, channel * width + width - 1, dtype)
        if has_bias:
            acc += _number(offsets, channel, dtype)
        for tap in tl.static_range(width - 1):
            acc += _number(window, channel * (width - 1) + tap, dtype) * _number(factors, channel * width + tap, dtype)
        if has_silu:
            acc = silu(acc)
        bits = acc.to(dtype).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        result = result | (bits << (channel * 16))
    result = tl.where(slot >= 0, result, 0)
    tl.store(out.to(whole, bitcast=True) + row * words + word, result, mask=inside)
    if block < 32:
        tl.debug_barrier()  # several threads load a word: all have it before one of them stores
    for at in tl.static_range(width - 1):
        moved = tl.zeros([block], tl.int64)
        for place in tl.static_range(4):
            if (at * 4 + place) % (width - 1) == width - 2:  # a channel's last tap
                moved = moved | _bits(new, (at * 4 + place) // (width - 1), place)
            else:
                moved = moved | _bits(window, at * 4 + place + 1, place)
        tl.store(taps + at, moved, mask=kept)


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
    state += slot * s_slot + channel * s_channel
    weight += channel * width
    x += begin * x_token + channel
    out += begin * channels + channel
    kept = limit(has_state + row, channels)
    first_token = number * chunk
    values = ()  # of the chunk's tokens and those before it that it needs
    for place in tl.static_range(chunk + width - 1):
        source = first_token + place + 1 - width
        fresh = channel < tl.where((source >= 0) & (source < length), channels, 0)
        value = tl.load(x + tl.cast(source, tl.int64) * x_token, mask=fresh, other=0.0)
        if place < width - 1:
            early = channel < tl.where(source < 0, kept, 0)
            value = tl.where(source < 0, tl.load(state + place * s_tap, mask=early, other=0.0), value)
        values = values + (value,)
    offset = tl.zeros([block], tl.float32)
    if has_bias:
        offset += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    factors = ()
    for tap in tl.static_range(width):
        factors = factors + (tl.load(weight + tap, mask=inside, other=0.0).to(tl.float32),)
    for place in tl.static_range(chunk):
        acc = offset
        for tap in tl.static_range(width):
            acc += values[place + tap].to(tl.float32) * factors[tap]
        if has_silu:
            acc = silu(acc)
        here = channel < tl.where(first_token + place < length, channels, 0)
        target = out + tl.cast(first_token + place, tl.int64) * channels
        tl.store(target, acc.to(out.dtype.element_ty), mask=here)
    if number == 0:
        tl.debug_barrier()  # other threads of this program have read the old state by now
        for tap in tl.static_range(width - 1):
            newest = length - (width - 1) + tap
            fresh = channel < tl.where(newest >= 0, channels, 0)
            new = tl.load(x + tl.cast(newest, tl.int64) * x_token, mask=fresh, other=0.0)
            old = tl.load(state + (length + tap) * s_tap, mask=(channel < kept) & (fresh == 0), other=0.0)
            tl.debug_barrier()  # and this one
            tl.store(state + tap * s_tap, tl.where(fresh, new, old), mask=inside)
