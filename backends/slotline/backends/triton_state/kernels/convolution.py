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
    """Advance by one token of each request: token r is request r's. Grid: (requests, blocks of channels)."""
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
    acc, factors = tl.zeros([block], tl.float32), ()
    if has_bias:
        acc = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(width):
        factors = factors + (tl.load(weight + channel * width + tap, mask=inside, other=0.0),)
    if early:
        before_inputs(ahead)
    window = window + (tl.load(x + row * x_token + channel, mask=inside, other=0.0),)
    for tap in tl.static_range(width):
        acc += window[tap].to(tl.float32) * factors[tap].to(tl.float32)
    if has_silu:
        acc = silu(acc)
    acc = tl.where(slot >= 0, acc, 0.0)
    tl.store(out + row * channels + channel, acc.to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # whichever thread loaded a number, it has it by now
    for tap in tl.static_range(width - 1):
        tl.store(state + tap * s_tap, window[tap + 1], mask=kept)


@triton.jit
def _halves(word):
    """Return a word of 64 bits as two of 32, which fit into a register each and are used for everything else."""
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def _whole(low, high):
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64)


@triton.jit
def _number(halves, index: tl.constexpr, dtype: tl.constexpr):
    """Return number `index` of 16-bit numbers that are packed two to a half, in float32."""
    if dtype == tl.bfloat16:  # the upper 16 bits of the same number in float32
        number = _bits(halves, index, 1).to(tl.float32, bitcast=True)
    else:
        number = _bits(halves, index, 0).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _bits(halves, index: tl.constexpr, place: tl.constexpr):
    """Return the bits of number `index`, at `place` of another half."""
    half = halves[index // 2]
    if place == 0:
        half = (half >> (index % 2 * 16)) & 0xFFFF
    elif index % 2 == 0:
        half = half << 16
    else:
        half = half & 0xFFFF0000
    return half


@triton.jit
def _moved(window, new, index: tl.constexpr, taps: tl.constexpr):
    """Return the half at `index` of the new state."""
    return _next(window, new, index * 2, taps, 0) | _next(window, new, index * 2 + 1, taps, 1)


@triton.jit
def _next(window, new, index: tl.constexpr, taps: tl.constexpr, place: tl.constexpr):
    """Return the new bits of number `index` of the state: the next tap's, or in a channel's last tap the new one."""
    last: tl.constexpr = index % taps == taps - 1
    return _bits(new, index // taps, place) if last else _bits(window, index + 1, place)


@triton.jit(do_not_specialize=["waits", "rows"])
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
    rows,
    waits,
    width: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
    early: tl.constexpr,
    ahead: tl.constexpr,
):
    """Do the work of `update` for 16-bit numbers, reading four channels at a time: their taps are whole words.

    With a load for each number it is the loads that take the time, not the bytes. `words`, `x_token` and `s_slot` count
    words, of a token's channels and between tokens and slots. The requests of a group share the weights that a program
    reads. Grid: (blocks of words, groups of requests).
    """
    dtype: tl.constexpr = out.dtype.element_ty
    whole: tl.constexpr = tl.pointer_type(tl.int64)
    first = tl.program_id(1) * group
    word = tl.program_id(0) * block + tl.arange(0, block)
    inside = word < words
    if early:
        before_states(waits, ahead)
    numbers, places, windows, factors, inputs = (), (), (), (), ()
    for index in tl.static_range(group):
        row = first + index
        slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
        begun = tl.load(has_state + row, mask=row < rows, other=0) != 0
        taps = state.to(whole, bitcast=True) + slot * s_slot
        known = word < tl.where(begun, tl.where(slot >= 0, words, 0), 0)
        window = ()
        for tap in tl.static_range(width - 1):
            window = window + _halves(tl.load(taps + word * (width - 1) + tap, mask=known, other=0))
        numbers, places, windows = numbers + (slot,), places + (taps,), windows + (window,)
    factors_at = weight.to(whole, bitcast=True) + word * width
    for tap in tl.static_range(width):
        factors = factors + _halves(tl.load(factors_at + tap, mask=inside, other=0))
    if has_bias:
        offsets = _halves(tl.load(bias.to(whole, bitcast=True) + word, mask=inside, other=0))
    if early:
        before_inputs(ahead)
    for index in tl.static_range(group):
        row = (first + index).to(tl.int64)
        asked = word < tl.where(first + index < rows, words, 0)
        inputs = inputs + (_halves(tl.load(x.to(whole, bitcast=True) + row * x_token + word, mask=asked, other=0)),)
    for index in tl.static_range(group):
        window, new, slot = windows[index], inputs[index], numbers[index]
        moved = ()
        for at in tl.static_range(width - 1):
            low, high = _moved(window, new, at * 2, width - 1), _moved(window, new, at * 2 + 1, width - 1)
            moved = moved + (_whole(low, high),)
        if block < 32:
            tl.debug_barrier()  # several threads load a word: all have it before one of them stores
        kept = word < tl.where(slot >= 0, words, 0)
        _store_words(places[index], word, moved, kept, width - 1, block)  # first: it is three quarters of the bytes
        results = ()
        for channel in tl.static_range(4):
            acc = _number(new, channel, dtype) * _number(factors, channel * width + width - 1, dtype)
            if has_bias:
                acc += _number(offsets, channel, dtype)
            for tap in tl.static_range(width - 1):
                factor = _number(factors, channel * width + tap, dtype)
                acc += _number(window, channel * (width - 1) + tap, dtype) * factor
            if has_silu:
                acc = silu(acc)
            results = results + (acc.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32),)
        low, high = results[0] | (results[1] << 16), results[2] | (results[3] << 16)
        result = tl.where(slot >= 0, _whole(low, high), 0)
        row = (first + index).to(tl.int64)
        asked = word < tl.where(first + index < rows, words, 0)
        tl.store(out.to(whole, bitcast=True) + row * words + word, result, mask=asked)


@triton.jit
def _store_words(taps, word, moved, kept, count: tl.constexpr, block: tl.constexpr):
    """Store the `count` words of four channels each, with adjacent threads for adjacent words.

    If each thread stored its own words, every sector would go to the L2 cache in parts, one for each store.
    """
    if count == 3:
        part = tl.arange(0, 4)
        four = tl.reshape(tl.join(tl.join(moved[0], moved[2]), tl.join(moved[1], moved[2])), [block, 4])
        tl.store(taps + word[:, None] * 3 + part[None, :], four, mask=kept[:, None] & (part < 3)[None, :])
    elif count == 2:
        part = tl.arange(0, 2)
        tl.store(taps + word[:, None] * 2 + part[None, :], tl.join(moved[0], moved[1]), mask=kept[:, None])
    else:
        for at in tl.static_range(count):
            tl.store(taps + word * count + at, moved[at], mask=kept)


@triton.jit(do_not_specialize=["first", "end"])
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
    """Compute a chunk of a request's tokens. Grid: (chunks, blocks of channels), see `find_chunk`.

    Only a request's first chunk accesses its state, and also writes the new one, so that no other program may read it.
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
