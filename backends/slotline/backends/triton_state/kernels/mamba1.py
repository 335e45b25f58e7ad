"""The selective scan of Mamba (Gu and Dao, arXiv 2312.00752, section 3): a decay for each channel and state."""

# mypy: ignore-errors
# ruff: noqa: RUF005 - the compiler knows tuples that are joined, not such that are unpacked

from __future__ import annotations

import triton
import triton.language as tl

from slotline.backends.triton_state.kernels.common import (
    before_inputs,
    before_states,
    find_chunk,
    limit,
    silu,
    time_step,
)


@triton.jit(do_not_specialize=["waits"])
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
    waits,
    size: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    full: tl.constexpr,
    has_skip: tl.constexpr,
    has_bias: tl.constexpr,
    has_gate: tl.constexpr,
    has_softplus: tl.constexpr,
    has_limit: tl.constexpr,
    early: tl.constexpr,
    ahead: tl.constexpr,
):
    """Advance by one token of each request.

    Token r is request r's. `full` if blocks have no padded channels or columns.

    Grid: (requests, blocks of channels).
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    column = tl.arange(0, padded)
    inside, real = channel < channels, column < size
    if full:
        inside, real = channel >= 0, column >= 0
    here = inside[:, None] & real[None, :]
    place = channel[:, None] * size + column[None, :]
    if early:
        before_states(waits, ahead)
    # All is asked for before anything is stored, behind which no load could be moved, and no branch makes what needs no
    # slot wait for it. What has the longest way to go comes first: states ahead of a wait, else the time steps.
    if not ahead:
        d = tl.load(dt + row * dt_token + channel, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            offset = tl.load(dt_bias + channel, mask=inside, other=0.0)
        value = tl.load(x + row * x_token + channel, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    held = state + slot * s_slot + place
    kept = tl.where(slot >= 0, size, 0)
    known = here & (column < tl.minimum(kept, limit(has_state + row, size)))[None, :]
    h = tl.load(held, mask=known, other=0.0).to(tl.float32)
    if early:
        before_inputs(ahead)
    rates = tl.load(rate + place, mask=here, other=0.0)
    if ahead:
        d = tl.load(dt + row * dt_token + channel, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * x_token + channel, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(b + row * b_token + column, mask=real, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_token + column, mask=real, other=0.0).to(tl.float32)
    if has_gate:
        gate = tl.load(z + row * z_token + channel, mask=inside, other=0.0).to(tl.float32)
    if has_skip:
        through = tl.load(skip + channel, mask=inside, other=0.0)
    if has_bias and ahead:
        offset = tl.load(dt_bias + channel, mask=inside, other=0.0)
    if has_bias:
        d += offset
    d = time_step(d, low, high, has_softplus, has_limit)
    # Where the logarithm's base goes hangs on what comes last: the time steps, or the rates and states.
    if ahead:
        decay = tl.exp2(d[:, None] * (rates * 1.4426950408889634))
    else:
        decay = tl.exp2((d * 1.4426950408889634)[:, None] * rates)
    h = decay * h + (d * value)[:, None] * added[None, :]
    y = tl.sum(h * read[None, :], 1)
    if has_skip:
        y += through * value
    if has_gate:
        y *= silu(gate)
    tl.store(held, h.to(state.dtype.element_ty), mask=here & (column < kept)[None, :])
    y = tl.where(slot >= 0, y, 0.0)
    tl.store(out + row * channels + channel, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "end"])
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
    segments,
    totals,
    out,
    starts,
    slots,
    has_state,
    first,
    end,
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
    group: tl.constexpr,
    segment: tl.constexpr,
    split: tl.constexpr,
    outputs: tl.constexpr,
):
    """Advance by all tokens of a request, one after the other, with the state in registers.

    Each thread has a channel's states, or some of them, so that only the sum over them crosses threads.

    Grid: (blocks of channels, requests from `first` on), or with `split` their segments (see `find_chunk`). Without
    `outputs` a segment's states, starting from zeros, go to segments [segments, channels, size], and the sums of its
    time steps to totals [segments, channels]. With `outputs` a segment begins with the states that `pass_states`
    computed from these.
    """
    index, number = tl.program_id(1), 0
    if split:
        row, number = find_chunk(index, starts, first, end, segment)
    else:
        row = first + index
    slot = tl.load(slots + row).to(tl.int64)
    begin = tl.load(starts + row).to(tl.int64)
    length = (tl.load(starts + row + 1) - begin).to(tl.int32)
    if split:
        begin += number * segment
        length -= number * segment
        last = length <= segment
        length = tl.minimum(length, segment)
        if not outputs:
            length = tl.where(last, 0, length)  # the contribution of the last one is not read
    if (slot < 0) | (length <= 0):
        return
    channel = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.arange(0, padded)
    inside, real = channel < channels, column < size
    here = real[:, None] & inside[None, :]
    place_of = channel[None, :] * size + column[:, None]  # [padded, block]
    state += slot * s_slot
    between = tl.cast(index, tl.int64) * channels
    if not split:
        known = here & (column < limit(has_state + row, size))[:, None]
        h = tl.load(state + place_of, mask=known, other=0.0).to(tl.float32)
    elif outputs:
        h = tl.load(segments + between * size + place_of, mask=here, other=0.0)
    else:
        h = tl.zeros([padded, block], tl.float32)
        total = tl.zeros([block], tl.float32)
    rates = tl.load(rate + place_of, mask=here, other=0.0) * 1.4426950408889634
    if has_bias:
        bias = tl.load(dt_bias + channel, mask=inside, other=0.0)
    if has_skip:
        through = tl.load(skip + channel, mask=inside, other=0.0)
    x += begin * x_token + channel
    dt += begin * dt_token + channel
    b += begin * b_token + column
    c += begin * c_token + column
    z += begin * z_token + channel
    out += begin * channels + channel
    for done in range(0, length, group):
        # All of a group's inputs are asked for before the first is used: a token takes less time than its inputs do.
        steps, values, added, read, gates = (), (), (), (), ()
        for place in tl.static_range(group):
            at = tl.cast(done + place, tl.int64)
            inside = channel < tl.where(done + place < length, channels, 0)
            real = column < tl.where(done + place < length, size, 0)
            steps = steps + (tl.load(dt + at * dt_token, mask=inside, other=0.0),)
            values = values + (tl.load(x + at * x_token, mask=inside, other=0.0),)
            added = added + (tl.load(b + at * b_token, mask=real, other=0.0),)
            if outputs:
                read = read + (tl.load(c + at * c_token, mask=real, other=0.0),)
            if has_gate and outputs:
                gates = gates + (tl.load(z + at * z_token, mask=inside, other=0.0),)
        for place in tl.static_range(group):
            inside = channel < tl.where(done + place < length, channels, 0)
            value = values[place].to(tl.float32)
            d = steps[place].to(tl.float32)
            if has_bias:
                d += bias
            d = tl.where(
                inside, time_step(d, low, high, has_softplus, has_limit), 0.0
            )  # what is not there adds nothing
            h = tl.exp2(d[None, :] * rates) * h + (d * value)[None, :] * added[place].to(tl.float32)[:, None]
            if outputs:
                y = tl.sum(h * read[place].to(tl.float32)[:, None], 0)
                if has_skip:
                    y += through * value
                if has_gate:
                    y *= silu(gates[place].to(tl.float32))
                tl.store(out + tl.cast(done + place, tl.int64) * channels, y.to(out.dtype.element_ty), mask=inside)
            else:
                total += d
    if not outputs:
        tl.store(segments + between * size + place_of, h, mask=here)
        tl.store(totals + between + channel, total, mask=channel < channels)
    elif split:
        if last:
            tl.store(state + place_of, h.to(state.dtype.element_ty), mask=here)
    else:
        tl.store(state + place_of, h.to(state.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["first"])
def pass_states(
    rate,
    state,
    segments,
    totals,
    starts,
    slots,
    has_state,
    first,
    s_slot,
    channels,
    size: tl.constexpr,
    padded: tl.constexpr,
    segment: tl.constexpr,
    block: tl.constexpr,
):
    """Turn the contribution of each segment into the state before it. Grid: (blocks of channels, requests)."""
    row = first + tl.program_id(1)
    offset = tl.load(starts + first)
    begin = tl.load(starts + row)
    length = tl.load(starts + row + 1) - begin
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (length <= 0):
        return
    channel = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.arange(0, padded)
    inside = channel < channels
    here = inside[:, None] & (column < size)[None, :]
    place = channel[:, None] * size + column[None, :]
    known = here & (column < limit(has_state + row, size))[None, :]
    rates = tl.load(rate + place, mask=here, other=0.0) * 1.4426950408889634
    h = tl.load(state + slot * s_slot + place, mask=known, other=0.0).to(tl.float32)
    index = (begin - offset) // segment + row - first
    for number in range(index, index + tl.cdiv(length, segment)):
        at = tl.cast(number, tl.int64) * channels
        more = number + 1 < index + tl.cdiv(length, segment)  # the contribution of the last one was not computed
        asked = here & (column < tl.where(more, size, 0))[None, :]
        added = tl.load(segments + at * size + place, mask=asked, other=0.0)
        total = tl.load(totals + at + channel, mask=channel < tl.where(more, channels, 0), other=0.0)
        tl.store(segments + at * size + place, h, mask=here)
        h = tl.exp2(total[:, None] * rates) * h + added
