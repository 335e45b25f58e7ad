"""Mamba-2 (Dao and Gu, arXiv 2405.21060): one decay for each head, so that a chunk of tokens is matrix products.

For a prompt, `times` makes time steps and running decays, and `scan` walks over the chunks of a request with the state
in registers: the dual form of section 6, fused. Where requests times heads would not fill the device, long requests are
cut into segments of many chunks, which run side by side: `scan` without outputs makes what each segment adds to the
state, `pass_states` makes of that the state before each segment, and `scan` starts from there.
"""

# mypy: ignore-errors

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
    x_head,
    dt_token,
    b_token,
    b_group,
    c_token,
    c_group,
    z_token,
    z_head,
    s_slot,
    num_heads,
    group,
    waits,
    head_size: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    has_skip: tl.constexpr,
    has_bias: tl.constexpr,
    has_gate: tl.constexpr,
    has_softplus: tl.constexpr,
    has_limit: tl.constexpr,
    early: tl.constexpr,
    ahead: tl.constexpr,
):
    """Advance by one token of each request: token r is request r's.

    Grid: (blocks of a head's rows, heads, requests).
    """
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    dim = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.arange(0, padded)
    inside, real = dim < head_size, column < size
    if early:
        before_states(waits, ahead)
    slot = tl.load(slots + row).to(tl.int64)
    here = inside[:, None] & (column < tl.where(slot >= 0, size, 0))[None, :]
    place = state + slot * s_slot + head * head_size * size + dim[:, None] * size + column[None, :]
    known = here & (column < limit(has_state + row, size))[None, :]
    h = tl.load(place, mask=known, other=0.0).to(tl.float32)
    if early:
        before_inputs(ahead)
    d = tl.load(dt + row * dt_token + head).to(tl.float32)
    if has_bias:
        d += tl.load(dt_bias + head)
    d = time_step(d, low, high, has_softplus, has_limit)
    decay = tl.exp(d * tl.load(rate + head))
    value = tl.load(x + row * x_token + head * x_head + dim, mask=inside, other=0.0).to(tl.float32)
    own = head // group
    added = tl.load(b + row * b_token + own * b_group + column, mask=real, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_token + own * c_group + column, mask=real, other=0.0).to(tl.float32)
    h = decay * h + (d * value)[:, None] * added[None, :]
    y = tl.sum(h * read[None, :], 1)
    if has_skip:
        y += tl.load(skip + head) * value
    if has_gate:
        y *= silu(tl.load(z + row * z_token + head * z_head + dim, mask=inside, other=0.0).to(tl.float32))
    tl.store(place, h.to(state.dtype.element_ty), mask=here)  # behind which no load could be moved
    y = tl.where(slot >= 0, y, 0.0)
    tl.store(out + (row * num_heads + head) * head_size + dim, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "end", "num_tokens"])
def times(
    dt,
    rate,
    dt_bias,
    steps,
    decays,
    starts,
    slots,
    first,
    end,
    low,
    high,
    dt_token,
    num_heads,
    num_tokens,
    chunk: tl.constexpr,
    block: tl.constexpr,
    has_bias: tl.constexpr,
    has_softplus: tl.constexpr,
    has_limit: tl.constexpr,
):
    """Compute time steps, and log2 of the decay from a chunk's begin through each token: both [heads, tokens] float32.

    Grid: (chunks, blocks of heads).
    """
    row, number = find_chunk(tl.program_id(0), starts, first, end, chunk)
    begin = tl.load(starts + row).to(tl.int64)
    length = (tl.load(starts + row + 1) - begin).to(tl.int32)
    if (tl.load(slots + row) < 0) | (number * chunk >= length):
        return
    token = number * chunk + tl.arange(0, chunk)
    head = tl.program_id(1) * block + tl.arange(0, block)
    inside = head < num_heads
    live = (token < length)[:, None] & inside[None, :]
    d = tl.load(dt + (begin + token)[:, None] * dt_token + head[None, :], mask=live, other=0.0).to(tl.float32)
    if has_bias:
        d += tl.load(dt_bias + head, mask=inside, other=0.0)[None, :]
    d = tl.where(live, time_step(d, low, high, has_softplus, has_limit), 0.0)
    rates = tl.load(rate + head, mask=inside, other=0.0) * 1.4426950408889634
    place = head[None, :].to(tl.int64) * num_tokens + (begin + token)[:, None]
    tl.store(steps + place, d, mask=live)
    tl.store(decays + place, tl.cumsum(d * rates[None, :], 0), mask=live)


@triton.jit
def _load(pointers, rows, columns, masked: tl.constexpr, wide: tl.constexpr):
    """Load a tile, with zeros for missing rows or columns. `masked` rows and columns that are not `wide` are tested."""
    if masked:
        return tl.load(pointers, mask=rows[:, None] & columns[None, :], other=0.0)
    if wide:
        return tl.load(pointers)
    return tl.load(pointers, mask=columns[None, :], other=0.0)


@triton.jit
def _chunk(
    h,
    done,
    stop,
    x,
    b,
    c,
    z,
    out,
    steps,
    decays,
    through,
    dim,
    x_token,
    b_token,
    c_token,
    z_token,
    num_heads,
    head_size: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
    outputs: tl.constexpr,
    has_skip: tl.constexpr,
    has_gate: tl.constexpr,
    precision: tl.constexpr,
    masked: tl.constexpr,
):
    """Compute the chunk of tokens from `done` on: the state after it, and log2 of its decay.

    Only a `masked` chunk may be incomplete.

    The pointers are at the request's first token and at the head.
    """
    column, token = tl.arange(0, padded), tl.arange(0, chunk)
    inside, real = dim < head_size, column < size
    all_inside: tl.constexpr = head_size % block == 0
    at = done + token
    live = at < stop
    before = tl.cast(done, tl.int64)
    x_at = x + before * x_token + (token[:, None] * x_token + dim[None, :])
    b_at = b + before * b_token + (token[:, None] * b_token + column[None, :])
    xs = _load(x_at, live, inside, masked, all_inside)
    bs = _load(b_at, live, real, masked, size == padded)
    if masked:
        total = tl.load(decays + stop - 1)
        step = tl.load(steps + at, mask=live, other=0.0)
        decay = tl.where(live, tl.load(decays + at, mask=live, other=0.0), total)
    else:
        total = tl.load(decays + done + chunk - 1)
        step = tl.load(steps + at)
        decay = tl.load(decays + at)
    if outputs:
        c_at = c + before * c_token + (token[:, None] * c_token + column[None, :])
        cs = _load(c_at, live, real, masked, size == padded)
        seen = token[:, None] >= token[None, :]
        weights = tl.where(seen, tl.exp2(decay[:, None] - decay[None, :]), 0.0) * step[None, :]
        weights *= tl.dot(cs, tl.trans(bs), input_precision=precision)
        y = tl.dot(cs, h.to(cs.dtype), input_precision=precision) * tl.exp2(decay)[:, None]
        y = tl.dot(weights.to(xs.dtype), xs, y, input_precision=precision)
        if has_skip:
            y += through * xs.to(tl.float32)
        if has_gate:
            z_at = z + before * z_token + (token[:, None] * z_token + dim[None, :])
            y *= silu(_load(z_at, live, inside, masked, all_inside).to(tl.float32))
        width = num_heads * head_size
        target = out + before * width + (token[:, None] * width + dim[None, :])
        if masked:
            tl.store(target, y.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])
        elif all_inside:
            tl.store(target, y.to(out.dtype.element_ty))
        else:
            tl.store(target, y.to(out.dtype.element_ty), mask=inside[None, :])
    kept = (xs.to(tl.float32) * (step * tl.exp2(total - decay))[:, None]).to(xs.dtype)
    h = tl.dot(tl.trans(bs), kept, h * tl.exp2(total), input_precision=precision)
    return h, total


@triton.jit(do_not_specialize=["first", "end", "num_tokens"])
def scan(
    x,
    b,
    c,
    skip,
    z,
    steps,
    decays,
    state,
    segments,
    totals,
    out,
    starts,
    slots,
    has_state,
    first,
    end,
    x_token,
    x_head,
    b_token,
    b_group,
    c_token,
    c_group,
    z_token,
    z_head,
    s_slot,
    num_heads,
    group,
    num_tokens,
    head_size: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    segment: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
    outputs: tl.constexpr,
    has_skip: tl.constexpr,
    has_gate: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute the chunks of a segment of a request, or of all of it unless `split`, for a block of a head's rows.

    Grid: (blocks of rows, heads, segments or requests from `first` on). `segments` [segments, heads, head_size, size]
    float32 is the contribution of a segment without `outputs`, and the state before it with `outputs`. `totals`
    [segments, heads] is log2 of its decay. `segment` is a multiple of `chunk`.
    """
    head = tl.program_id(1)
    index = tl.program_id(2)
    row, number = first + index, 0
    if split:
        row, number = find_chunk(index, starts, first, end, segment)
    begin = tl.load(starts + row).to(tl.int64)
    length = (tl.load(starts + row + 1) - begin).to(tl.int32)
    slot = tl.load(slots + row).to(tl.int64)
    begun, stop = 0, length
    if split:
        begun, stop = number * segment, tl.minimum(length, (number + 1) * segment)
    if (slot < 0) | (begun >= length):
        return
    if not outputs and stop == length:
        return  # nothing follows that would need it
    dim = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.arange(0, padded)
    inside, real = dim < head_size, column < size
    here = real[:, None] & inside[None, :]
    within = head * head_size * size + dim[None, :] * size + column[:, None]  # [padded, block]
    of_slot = state + slot * s_slot + within
    of_segment = segments + index.to(tl.int64) * num_heads * head_size * size + within
    if split:
        if outputs:  # noqa: SIM108 - both sides of an expression would be compiled
            h = tl.load(of_segment, mask=here, other=0.0)
        else:
            h = tl.zeros([padded, block], tl.float32)
    else:
        known = here & (column < limit(has_state + row, size))[:, None]
        h = tl.load(of_slot, mask=known, other=0.0).to(tl.float32)
    through = 0.0
    if has_skip:
        through = tl.load(skip + head)
    own = head // group
    x += begin * x_token + head * x_head
    b += begin * b_token + own * b_group
    c += begin * c_token + own * c_group
    z += begin * z_token + head * z_head
    out += begin * num_heads * head_size + head * head_size
    steps += head.to(tl.int64) * num_tokens + begin
    decays += head.to(tl.int64) * num_tokens + begin
    all_decay = 0.0
    whole = begun + (stop - begun) // chunk * chunk
    for part in tl.static_range(2):  # whole chunks, which need no mask over tokens, and what is left
        start_at, stop_at = (begun, whole) if part == 0 else (whole, stop)
        for done in tl.range(start_at, stop_at, chunk, num_stages=stages if part == 0 else 1):
            h, total = _chunk(
                h,
                done,
                stop,
                x,
                b,
                c,
                z,
                out,
                steps,
                decays,
                through,
                dim,
                x_token,
                b_token,
                c_token,
                z_token,
                num_heads,
                head_size,
                size,
                padded,
                chunk,
                block,
                outputs,
                has_skip,
                has_gate,
                precision,
                masked=part == 1,
            )
            all_decay += total
    if outputs:
        last = column < tl.where(stop == length, size, 0)
        tl.store(of_slot, h.to(state.dtype.element_ty), mask=last[:, None] & inside[None, :])
    else:
        tl.store(of_segment, h, mask=here)
        tl.store(totals + index * num_heads + head, all_decay)


@triton.jit(do_not_specialize=["first"])
def pass_states(
    state,
    segments,
    totals,
    starts,
    slots,
    has_state,
    first,
    s_slot,
    num_heads,
    numbers: tl.constexpr,
    segment: tl.constexpr,
    block: tl.constexpr,
):
    """Turn the contribution of each segment into the state before it.

    Grid: (blocks of a head's numbers, heads, requests).
    """
    head = tl.program_id(1)
    row = first + tl.program_id(2)
    offset = tl.load(starts + first)
    begin = tl.load(starts + row)
    length = tl.load(starts + row + 1) - begin
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (length <= 0):
        return
    place = tl.program_id(0) * block + tl.arange(0, block)
    here = place < numbers
    known = place < limit(has_state + row, numbers)
    h = tl.load(state + slot * s_slot + head * numbers + place, mask=known, other=0.0).to(tl.float32)
    index = (begin - offset) // segment + row - first
    for number in range(index, index + tl.cdiv(length, segment)):
        at = segments + (tl.cast(number, tl.int64) * num_heads + head) * numbers + place
        more = number + 1 < index + tl.cdiv(length, segment)  # the contribution of the last one was not computed
        added = tl.load(at, mask=place < tl.where(more, numbers, 0), other=0.0)
        tl.store(at, h, mask=here)
        h = tl.exp2(tl.load(totals + number * num_heads + head, mask=more, other=0.0)) * h + added
