"""Triton kernels of the sampler. `triton_sampling` launches them and explains the method.

A row's vocabulary is cut into groups of `group` neighbouring tokens. Every number here depends on a single row, and its
sums run in an order that the vocabulary's size fixes: a row gives the same bits in any batch.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.core.sampling.nan_logits import NAN_LOGITS

SIZES = ["num_groups", "num_tiles"]
"""Compiled once for all: nothing that is loaded is aligned by them. If vocab_size is a multiple of 16, loads are."""
LARGEST = tl.constexpr(3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_EASY = tl.constexpr(0.25)
"""Temperature below which a logit over it may be so large that its rounding is seen in its weight."""
DEEP = tl.constexpr(4)
"""Tiles of groups that a row looks at within one program. If it has to read more of them, further programs do."""
LOWEST = tl.constexpr(-0x7F800000)
"""`_key` of minus infinity."""
MARK = tl.constexpr(NAN_LOGITS)


@triton.jit(do_not_specialize=SIZES)
def group_stats(
    logits,  # [n, vocab_size] float32
    stride,
    packed,  # [n, 8] int32
    maxima,  # [n, num_groups] float32, out: the largest scaled logit of each group
    sums,  # [n, num_groups] float32, out: the sum of exp(scaled logit - the group's maximum), negative if it holds NaN
    left,  # [1 + n] int32, the first is set to 0: the number of rows that `draw_rows` leaves
    vocab_size,
    num_groups,
    num_tiles,
    group: tl.constexpr,
    tile: tl.constexpr,
):
    """Compute the statistics of `tile` groups of a row in each program."""
    program = tl.program_id(0)
    row = (program // num_tiles).to(tl.int64)
    groups = (program % num_tiles) * tile + tl.arange(0, tile)
    packed += row * 8
    temperature = tl.load(packed).to(tl.float32, bitcast=True)
    x = _loaded(logits + row * stride, groups, num_groups, vocab_size, group)
    held = groups < num_groups
    maxima += row * num_groups
    sums += row * num_groups
    if program == 0:
        tl.store(left, 0)
    # Without a division for each logit, and in as few instructions as NaN and infinities allow.
    top = tl.max(x, 1)
    start = tl.maximum(top, -LARGEST)  # where all are minus infinity
    start = tl.minimum(start, LARGEST)
    finite = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    total = tl.sum(tl.exp2((finite - start[:, None]) * tl.math.div_rn(LOG2_E, temperature)), 1)
    total = tl.where(top == -float("inf"), 1.0, total)
    if (tl.max((total != total).to(tl.int32), 0) == 0) & (temperature >= LEAST_EASY):
        tl.store(maxima + groups, tl.math.div_rn(top, temperature), held)
        tl.store(sums + groups, total, held)
    else:
        y = _over_temperature(x, packed)
        most = tl.max(y, 1)
        sign = tl.where(tl.max((x != x).to(tl.int32), 1) != 0, -1.0, 1.0)
        tl.store(maxima + groups, most, held)
        tl.store(sums + groups, sign * tl.sum(_weights(y, most[:, None]), 1), held)


@triton.jit(do_not_specialize=[*SIZES, "kept"])
def draw_rows(
    logits,  # [n, vocab_size] float32
    stride,
    packed,  # [n, 8] int32
    maxima,  # [n, num_groups] float32, from `group_stats`
    sums,  # [n, num_groups] float32, overwritten if a row looks at groups again
    chosen,  # [n, num_groups] int32, out: groups that a row looks at again
    plans,  # [n, 16] int32, out, see `_leave`
    left,  # [1 + n] int32, in and out: the rows that are left to other kernels, in any order, behind their number
    tokens,  # [n] int64, out
    least,  # [n] float32, out: the smallest scaled logit that may be drawn
    holds_nan,  # [n] bool, out: whether the row holds NaN
    stand_ins,  # [n] int64, not read unless `kept`
    table,  # int64, out if `kept`: each token at the place of its stand-in
    host,  # [n] int64, out if `kept`: the tokens, in the host's memory
    kept,
    vocab_size,
    num_groups,
    group: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,  # at least num_groups, a power of 2
):
    """Find the threshold that a row's limits set, then draw. Each program does one row.

    Rows of which more than `DEEP` tiles have to be read are left to `sum_parts` and `draw_deep_rows`.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    packed += row * 8
    maxima += row * num_groups
    sums += row * num_groups
    chosen += row * num_groups
    plans += row * 16
    groups = tl.arange(0, width)
    peaks = tl.load(maxima + groups, groups < num_groups, -float("inf"))
    most = tl.max(peaks, 0)
    whole_sums = tl.load(sums + groups, groups < num_groups, 0.0)
    nan = tl.min(whole_sums, 0) < 0
    tl.store(holds_nan + row, nan)
    deep = 0  # groups of a row that is left to the other kernels
    if (tl.load(packed + 4) != 0) | (most == -float("inf")):
        place = tl.min(tl.where(peaks == most, groups, width), 0)
        inner = tl.arange(0, group)
        y = tl.max(_scaled(logits, packed, place + tl.zeros([1], tl.int32), num_groups, vocab_size, group), 0)
        token = (place * group + tl.min(tl.where(y == most, inner, group), 0)).to(tl.int64)
        tl.store(least + row, -float("inf"))
    else:
        masses = tl.abs(whole_sums) * _weights(peaks, most)
        top_p = tl.load(packed + 1).to(tl.float32, bitcast=True)
        log_floor = tl.load(packed + 2).to(tl.float32, bitcast=True)
        floor = tl.where(log_floor == -float("inf"), log_floor, most + log_floor)
        top_k = tl.load(packed + 3)
        limited = (top_k > 0) & (top_k < vocab_size)
        bound = floor
        looked_at = 0
        if limited | (top_p < 1) | (floor > -float("inf")):
            # no kept logit is below the pivot: at least k groups have a logit at or above it
            wanted = tl.where(limited, top_k, tl.where(floor > -float("inf"), width + 1, tile // 2))
            bound = tl.maximum(_pivot(peaks, most, wanted, tl.maximum(wanted, tile)), floor)
            whole = tl.sum(masses.to(tl.float64), 0)
            rest = tl.sum(tl.zeros([tile], tl.float64), 0)
            counted = bound
            if (limited == 0) & (floor == -float("inf")):
                share = top_p.to(tl.float64) * whole
                held = tl.sum(tl.where(peaks >= bound, masses, 0.0).to(tl.float64), 0)  # at least what is above it
                if held > 0.999 * share:
                    looked_at = _choose(peaks, bound, groups, chosen)
                    below = _unkey(tl.maximum(_key(bound) - 1, LOWEST))
                    held, _, _ = _look(logits, packed, chosen, looked_at, vocab_size, most, below, group, tile)
                if held < share:  # a flat row: the pivot was too high
                    # all tokens below this one together weigh less than the share outside of the nucleus
                    bound = most + tl.log((1 - top_p) * whole.to(tl.float32) / vocab_size) - 0.01
                    looked_at = _choose(peaks, bound, groups, chosen)
                # of all tokens: those of the chosen groups below the bound count, those of other groups do not
                rest -= tl.sum(tl.where(peaks >= bound, 0.0, masses).to(tl.float64), 0)
                counted = -float("inf")
            else:
                looked_at = _choose(peaks, bound, groups, chosen)
                if limited | (top_p < 1):
                    below = _unkey(tl.maximum(_key(bound) - 1, LOWEST))
                    whole, count, smallest = _look(
                        logits, packed, chosen, looked_at, vocab_size, most, below, group, tile
                    )
                    if limited:
                        if count > top_k:
                            bound, whole = _kth_largest(
                                logits, packed, chosen, looked_at, vocab_size, most, bound, top_k, group, tile
                            )
                        elif count == top_k:  # the pivot may be minus infinity, like masked logits
                            bound = smallest
                        counted = bound
            share = top_p.to(tl.float64) * whole
            low = _unkey(tl.maximum(_key(bound) - 1, LOWEST))
            if looked_at > DEEP * tile:
                deep = looked_at
                high = low
                if top_p < 1:
                    rest += whole - share
                    low, high = _estimate(
                        logits, packed, chosen, looked_at, vocab_size, most, bound, counted, rest, group, tile
                    )
                _leave(plans, low, high, bound, most, share, packed)
                tl.store(left + 1 + tl.atomic_add(left, 1), row.to(tl.int32))
            else:
                if top_p < 1:
                    bound = _nucleus(logits, packed, chosen, looked_at, vocab_size, most, low, most, share, group, tile)
                _kept_masses(logits, packed, chosen, sums, looked_at, vocab_size, most, bound, group, tile)
                tl.debug_barrier()
                masses = tl.load(sums + groups, groups < looked_at, 0.0)
        token = tl.zeros([], tl.int64)
        if deep == 0:
            tl.store(least + row, bound)
            token = _drawn(
                logits, packed, chosen, looked_at, masses, groups, most, bound, num_groups, vocab_size, group, width
            )
    tl.store(plans + 4, deep)
    if deep == 0:
        hand_over(token, nan, row, tokens, stand_ins, table, host, kept)


@triton.jit
def _leave(plan, low, high, bound, most, share, packed):
    """Write a row's plan for `sum_parts` and `draw_deep_rows`.

    The smallest kept logit is in (low, high], or is `bound` if those are equal. It is `bound` or larger. The kept ones
    weigh `share` or just more. Place 4 has the number of chosen groups, 0 for a row that is done. Places 8 and 9 are
    `low` and `high` of logits that are not divided by the temperature yet.
    """
    tl.store(plan, low.to(tl.int32, bitcast=True))
    tl.store(plan + 1, high.to(tl.int32, bitcast=True))
    tl.store(plan + 2, bound.to(tl.int32, bitcast=True))
    tl.store(plan + 3, most.to(tl.int32, bitcast=True))
    tl.store((plan + 6).to(tl.pointer_type(tl.float64)), share)
    tl.store(plan + 8, _undivided(low, packed).to(tl.int32, bitcast=True))
    tl.store(plan + 9, _undivided(high, packed).to(tl.int32, bitcast=True))


@triton.jit
def _undivided(y, packed):
    """Return the largest number that is `y` or less over the temperature: logits above it are those above `y` then."""
    temperature = tl.load(packed).to(tl.float32, bitcast=True)
    x = y * temperature
    near = _unkey(tl.maximum(_key(x), LOWEST + 32) + tl.arange(0, 32) - 16)  # the rounding of both is less than that
    largest = tl.max(tl.where(tl.math.div_rn(near, temperature) <= y, near, -float("inf")), 0)
    return tl.where(tl.abs(x) <= LARGEST, largest, x)


@triton.jit
def _planned(plan):
    """Return what `_leave` wrote first: low, high, bound, most."""
    low = tl.load(plan).to(tl.float32, bitcast=True)
    high = tl.load(plan + 1).to(tl.float32, bitcast=True)
    bound = tl.load(plan + 2).to(tl.float32, bitcast=True)
    return low, high, bound, tl.load(plan + 3).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_tiles"])
def sum_parts(
    logits,  # [n, vocab_size] float32
    stride,
    packed,  # [n, 8] int32
    plans,  # [n, 16] int32, from `draw_rows`, as `left` is
    left,
    near,  # [n, num_tiles, room] float32, out: a tile's logits in (low, high], as many as there is room for
    counts,  # [n, num_tiles] int32, out: their number
    masses,  # [n, num_tiles] float64, out: weights above `high`
    vocab_size,
    num_tiles,
    group: tl.constexpr,
    tile: tl.constexpr,
    room: tl.constexpr,
    block: tl.constexpr,  # groups at a time
):
    """Sum up and list what `draw_deep_rows` needs of the rows that `draw_rows` left, a tile at a time.

    The logits are not divided by the temperature one by one: the bounds are numbers before that, and a weight is
    exp2((x - base) * scale), with a factor for what base over the temperature differs from the row's largest.
    """
    size: tl.constexpr = block * group
    steps: tl.constexpr = tile // block
    inner = tl.arange(0, size)
    for item in range(tl.program_id(0), tl.load(left) * num_tiles, tl.num_programs(0)):
        row = tl.load(left + 1 + item // num_tiles).to(tl.int64)
        index = item % num_tiles
        plan = plans + row * 16
        low = tl.load(plan + 8).to(tl.float32, bitcast=True)
        high = tl.load(plan + 9).to(tl.float32, bitcast=True)
        most = tl.load(plan + 3).to(tl.float32, bitcast=True)
        temperature = tl.load(packed + row * 8).to(tl.float32, bitcast=True)
        scale = tl.math.div_rn(LOG2_E, temperature)
        base = tl.minimum(tl.maximum(most * temperature, -LARGEST), LARGEST)
        at = row * num_tiles + index
        first = index * tile
        source = logits + row * stride
        listed = near + at * room
        count = 0
        mass = 0.0
        ids = first * group + inner
        following = tl.load(source + ids, ids < vocab_size, -float("inf"))
        for step in range(steps):
            x = following
            ids = (first + (step + 1) * block) * group + inner  # the next ones come while these are summed up
            following = tl.load(source + ids, (ids < vocab_size) & (step + 1 < steps), -float("inf"))
            weight = tl.exp2((tl.minimum(x, LARGEST) - base) * scale)
            mass += tl.sum(tl.where(x > high, weight, 0.0), 0)
            inside = ((x > low) & (x <= high)).to(tl.int32)
            place = count + tl.cumsum(inside, 0) - 1
            tl.store(listed + place, x, (inside != 0) & (place < room))
            count += tl.sum(inside, 0)
        tl.store(counts + at, count)
        factor = tl.exp(tl.math.div_rn(tl.fma(-most, temperature, base), temperature))
        tl.store(masses + at, mass.to(tl.float64) * tl.where(tl.abs(most) <= LARGEST, factor, 1.0))


@triton.jit(do_not_specialize=[*SIZES, "kept"])
def draw_deep_rows(
    logits,  # [n, vocab_size] float32
    stride,
    packed,  # [n, 8] int32
    sums,  # [n, num_groups] float32, scratch
    chosen,  # [n, num_groups] int32, from `draw_rows`
    plans,  # [n, 16] int32, from `draw_rows`
    near,  # [n, num_tiles, room] float32, from `sum_parts`, as `counts` and `masses` are
    counts,
    masses,
    tokens,  # this and the next ones as in `draw_rows`
    least,
    holds_nan,
    stand_ins,
    table,
    host,
    kept,
    vocab_size,
    num_groups,
    num_tiles,
    group: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
    room: tl.constexpr,
    listed: tl.constexpr,  # how many of a tile's listed logits are held at a time
    all_tiles: tl.constexpr,  # at least num_tiles, a power of 2
):
    """Find the end of the nuclei that `draw_rows` bounded, and draw. Each program does one row.

    The end is among the listed logits. If it is not, or a tile had more of them than there is room for, the chosen
    groups are looked at again.
    """
    row = tl.program_id(0).to(tl.int64)
    plan = plans + row * 16
    looked_at = tl.load(plan + 4)
    if looked_at > 0:
        low, high, bound, most = _planned(plan)
        share = tl.load((plan + 6).to(tl.pointer_type(tl.float64)))
        logits += row * stride
        packed += row * 8
        sums += row * num_groups
        chosen += row * num_groups
        tiles = tl.arange(0, all_tiles)
        held = tiles < num_tiles
        number = tl.load(counts + row * num_tiles + tiles, held, 0)
        mass = tl.load(masses + row * num_tiles + tiles, held, 0.0)
        places = near + (row * num_tiles + tiles)[:, None] * room + tl.arange(0, listed)[None, :]
        longest = tl.max(number, 0)
        again = 0
        if low != high:
            above = tl.sum(mass, 0)
            y, weight = _listed(places, number, packed, most, 0, listed)
            whole = above + _total(weight)
            if (longest > listed) & (longest <= room):
                for start in range(listed, longest, listed):
                    _, more = _listed(places, number, packed, most, start, listed)
                    whole += _total(more)
            if longest > room:
                low = _unkey(tl.maximum(_key(bound) - 1, LOWEST))
                again = 1
            elif whole < share:  # the estimate was wrong: the nucleus ends below
                high = low
                low = _unkey(tl.maximum(_key(bound) - 1, LOWEST))
                again = 1
            if above >= share:  # or above
                low = high
                high = most
                again = 1
            if again != 0:
                bound = _nucleus(logits, packed, chosen, looked_at, vocab_size, most, low, high, share, group, tile)
            elif longest <= listed:
                flat = tl.reshape(y, [all_tiles * listed])
                bound = _end_of_nucleus(flat, tl.reshape(weight, [all_tiles * listed]), low, high, share - above)
                mass += tl.sum(tl.where(y >= bound, weight, 0.0), 1).to(tl.float64)
            else:
                bound = _end_of_long_lists(places, number, longest, packed, most, low, high, share - above, listed)
                for start in range(0, longest, listed):
                    y, weight = _listed(places, number, packed, most, start, listed)
                    mass += tl.sum(tl.where(y >= bound, weight, 0.0), 1).to(tl.float64)
        tl.store(least + row, bound)
        if again != 0:
            _kept_masses(logits, packed, chosen, sums, looked_at, vocab_size, most, bound, group, tile)
            tl.debug_barrier()
            groups = tl.arange(0, width)
            group_masses = tl.load(sums + groups, groups < looked_at, 0.0)
            token = _drawn(
                logits,
                packed,
                chosen,
                looked_at,
                group_masses,
                groups,
                most,
                bound,
                num_groups,
                vocab_size,
                group,
                width,
            )
        else:
            target = _uniform(tl.load((packed + 6).to(tl.pointer_type(tl.uint64)))) * tl.sum(mass, 0)
            place, before = _passes(mass, tiles, target, all_tiles)
            members = place * tile + tl.arange(0, tile)
            x = _scaled(logits, packed, members, num_groups, vocab_size, group)
            group_mass = tl.sum(tl.where(x >= bound, _weights(x, most), 0.0), 1).to(tl.float64)
            target -= before
            inner, before = _passes(group_mass, tl.arange(0, tile), target, tile)
            token = _token(
                logits, packed, place * tile + inner, target - before, most, bound, num_groups, vocab_size, group
            )
        hand_over(token, tl.load(holds_nan + row) != 0, row, tokens, stand_ins, table, host, kept)


@triton.jit
def _drawn(
    logits,
    packed,
    chosen,
    looked_at,
    masses,
    groups,
    most,
    bound,
    num_groups,
    vocab_size,
    group: tl.constexpr,
    width: tl.constexpr,
):
    """Return the token at which the running sum of the groups' masses passes the drawn share of the whole.

    The masses are those of the chosen groups, or of all if none are chosen.
    """
    mass = masses.to(tl.float64)
    target = _uniform(tl.load((packed + 6).to(tl.pointer_type(tl.uint64)))) * tl.sum(mass, 0)
    place, before = _passes(mass, groups, target, width)
    if looked_at > 0:
        place = tl.load(chosen + place)
    return _token(logits, packed, place, target - before, most, bound, num_groups, vocab_size, group)


@triton.jit
def _passes(mass, index, target, size: tl.constexpr):
    """Return the place where the running sum of masses [size] passes the target, and the sum before it.

    It is the last place with a mass if rounding keeps the sum below the target.
    """
    place = tl.min(tl.where((tl.cumsum(mass, 0) > target) & (mass > 0), index, size), 0)
    if place == size:
        place = tl.max(tl.where(mass > 0, index, 0), 0)
    return place, tl.sum(tl.where(index < place, mass, 0.0), 0)


@triton.jit
def _token(logits, packed, place, target, most, bound, num_groups, vocab_size, group: tl.constexpr):
    """Return the token of a group at which the running sum of weights passes the target."""
    inner = tl.arange(0, group)
    y = tl.max(_scaled(logits, packed, place + tl.zeros([1], tl.int32), num_groups, vocab_size, group), 0)
    weight = tl.where(y >= bound, _weights(y, most), 0.0).to(tl.float64)
    earlier = inner[None, :] <= inner[:, None]
    running = tl.sum(tl.where(earlier, weight[None, :], 0.0), 1)
    first = tl.min(tl.where((running > target) & (weight > 0), inner, group), 0)
    first = tl.where(first < group, first, tl.max(tl.where(weight > 0, inner, 0), 0))
    return (place * group + first).to(tl.int64)


@triton.jit
def hand_over(token, nan, row, tokens, stand_ins, table, host, kept):
    """Write down a row's token. With `kept`, also write it for the next step and for the host.

    The host gets a mark instead of the token of a row that holds NaN.
    """
    tl.store(tokens + row, token)
    if kept:
        tl.store(table + tl.load(stand_ins + row), token)
        tl.store(host + row, tl.where(nan, MARK, token))


@triton.jit(do_not_specialize_on_alignment=["words", "places"])
def ban_tokens(
    logits,  # [n, vocab_size] float32, changed in place
    words,  # [num_rows, num_words] int32, a bit for each token
    places,  # [num_rows] int32, rows of the logits
    vocab_size,
    num_words,
    block: tl.constexpr,
):
    """Write minus infinity where a bit is 0. Each program does `block` words of a row."""
    row = tl.load(places + tl.program_id(0)).to(tl.int64)
    index = tl.program_id(1) * block + tl.arange(0, block)
    word = tl.load(words + tl.program_id(0) * num_words + index, index < num_words, -1)
    bits = tl.arange(0, 32)[None, :]
    tokens = index[:, None] * 32 + bits
    banned = (tokens < vocab_size) & (((word[:, None] >> bits) & 1) == 0)
    tl.store(logits + row * vocab_size + tokens, tl.full([block, 32], -float("inf"), tl.float32), banned)


@triton.jit(do_not_specialize_on_alignment=["touched", "tokens", "marked"])
def mark_rows(
    logits,  # [n, vocab_size] float32, after the processors
    raw,  # [n, vocab_size] float32, before them
    touched,  # [n] bool, not read if `every`
    tokens,  # [n] int64
    marked,  # [n] int64, out
    vocab_size,
    not_finite,
    none_left,
    every: tl.constexpr,
    greedy: tl.constexpr,  # each token is the place of its row's largest logit, or of NaN
    block: tl.constexpr,
):
    """Write a row's token, or the mark that none can be drawn. Each program does one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    looked_at = True
    if not every:
        looked_at = tl.load(touched + row) != 0
    if looked_at:
        logits += row * vocab_size
        raw += row * vocab_size
        if greedy:
            best = tl.load(logits + token)
            wrong = _made_here(best, tl.load(raw + token)).to(tl.int32)
        else:
            most = tl.full([block], -float("inf"), tl.float32)
            wrongs = tl.zeros([block], tl.int32)
            for start in range(0, vocab_size, block):
                places = start + tl.arange(0, block)
                x = tl.load(logits + places, places < vocab_size, -float("inf"))
                bad = (x != x) | (x == float("inf"))
                wrongs |= _made_here(x, tl.load(raw + places, bad, float("inf"))).to(tl.int32)
                most = tl.maximum(most, tl.where(bad, float("inf"), x))
            best = tl.max(most, 0)
            wrong = tl.max(wrongs, 0)
        token = tl.where(best == -float("inf"), none_left, token)
        token = tl.where(wrong != 0, not_finite, token)
    tl.store(marked + row, token)


@triton.jit
def _made_here(x, before):
    """Return whether processors turned a number into NaN or infinity."""
    bad = (x != x) | (x == float("inf"))
    return bad & (before == before) & (tl.abs(before) != float("inf"))


@triton.jit
def _uniform(z):
    """Return the random number of a counter, as `sampling_metadata.uniforms` computes it."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 11).to(tl.float64) * 2.0**-53


@triton.jit
def _scaled(logits, packed, groups, num_groups, vocab_size, group: tl.constexpr):
    """Load a row's logits of some groups over the temperature, [len(groups), group], minus infinity outside."""
    return _over_temperature(_loaded(logits, groups, num_groups, vocab_size, group), packed)


@triton.jit
def _loaded(logits, groups, num_groups, vocab_size, group: tl.constexpr):
    """Load a row's logits of some groups, [len(groups), group], minus infinity outside."""
    ids = groups[:, None] * group + tl.arange(0, group)[None, :]
    return tl.load(logits + ids, (groups < num_groups)[:, None] & (ids < vocab_size), -float("inf"))


@triton.jit
def _over_temperature(x, packed):
    """Divide logits by a row's temperature."""
    # in a greedy row NaN is the largest, as in torch's argmax, and in other rows it is never drawn
    x = tl.where(x == x, x, tl.where(tl.load(packed + 4) != 0, float("inf"), -float("inf")))
    temperature = tl.load(packed).to(tl.float32, bitcast=True)
    if temperature != 1.0:
        x = tl.math.div_rn(x, temperature)
    return x


@triton.jit
def _weights(y, most):
    """Return exp(y - most), and 1 for y = most if both are infinite."""
    return tl.where(y == most, 1.0, tl.exp(y - most))


@triton.jit
def _tile(logits, packed, chosen, start, looked_at, vocab_size, group: tl.constexpr, tile: tl.constexpr):
    """Load the scaled logits of the chosen groups from `start` on, [tile, group]."""
    places = start + tl.arange(0, tile)
    groups = tl.load(chosen + places, places < looked_at, 2**26)  # the default is outside any vocabulary
    return _scaled(logits, packed, groups, 2**26, vocab_size, group)


@triton.jit
def _key(y):
    """Return float32 as int32 in the same order. Both zeros map to one number, and neighbours to neighbours."""
    bits = y.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _unkey(key):
    return tl.where(key < 0, (-key) | -0x80000000, key).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Return the mean rounded down, of int32 whose sum may overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _pivot(peaks, most, n, enough):
    """Return a number that at least n and at most `enough` of the groups' maxima reach, if it can be found soon.

    It is the n-th largest maximum in any case if many are equal. It is minus infinity if fewer than n are above that.

    """
    high = _key(most)
    low = _key(tl.min(tl.where(peaks == -float("inf"), most, peaks), 0))
    if tl.sum((peaks > -float("inf")).to(tl.int32), 0) < n:
        low = LOWEST
        high = LOWEST
    while low < high:
        middle = _middle(low, high)
        above = tl.sum((peaks > _unkey(middle)).to(tl.int32), 0)
        low = tl.where(above < n, low, middle + 1)
        high = tl.where(above < n, middle, tl.where(above <= enough, low, high))
    return _unkey(low)


@triton.jit
def _choose(peaks, pivot, groups, chosen):
    """List the groups with a logit at or above the pivot in token order. Return their number."""
    wanted = ((peaks >= pivot) & (peaks > -float("inf"))).to(tl.int32)
    tl.debug_barrier()  # the list of an earlier call may still be read
    tl.store(chosen + tl.cumsum(wanted, 0) - 1, groups, wanted != 0)
    tl.debug_barrier()
    return tl.sum(wanted, 0)


@triton.jit
def _look(logits, packed, chosen, looked_at, vocab_size, most, bound, group: tl.constexpr, tile: tl.constexpr):
    """Return the weight and the number of the chosen groups' logits above the bound, and the smallest of them."""
    mass = tl.sum(tl.zeros([tile], tl.float64), 0)
    count = 0
    least = float("inf")
    for start in range(0, looked_at, tile):
        y = _tile(logits, packed, chosen, start, looked_at, vocab_size, group, tile)
        above = y > bound
        mass += _total(tl.where(above, _weights(y, most), 0.0))
        count += tl.sum(tl.sum(above.to(tl.int32), 1), 0)
        least = tl.minimum(least, tl.min(tl.min(tl.where(above, y, float("inf")), 1), 0))
    return mass, count, least


@triton.jit
def _total(x):
    """Return the sum of a block, float64."""
    return tl.sum(tl.sum(x, 1).to(tl.float64), 0)


@triton.jit
def _kth_largest(
    logits, packed, chosen, looked_at, vocab_size, most, bound, k, group: tl.constexpr, tile: tl.constexpr
):
    """Return the k-th largest logit, of more than k at or above the bound, and the weight of k logits down to it."""
    low = _key(bound)
    high = _key(most)
    mass_above = tl.sum(tl.zeros([tile], tl.float64), 0)  # of the logits above `high`, and how many they are
    above = 0
    while low < high:
        middle = _middle(low, high)
        mass, count, least = _look(logits, packed, chosen, looked_at, vocab_size, most, _unkey(middle), group, tile)
        fewer = count <= k
        low = tl.where(fewer, low, middle + 1)
        high = tl.where(fewer, middle, high)
        mass_above = tl.where(fewer, mass, mass_above)
        above = tl.where(fewer, count, above)
        if count == k:  # the k-th is the least of those, mostly found long before the bounds meet
            low = _key(least)
            high = low
    # if several logits equal the k-th, top-k counts only as many of them as it needs
    return _unkey(low), mass_above + (k - above).to(tl.float64) * _weights(_unkey(low), most).to(tl.float64)


@triton.jit
def _nucleus(
    logits, packed, chosen, looked_at, vocab_size, most, low, high, share, group: tl.constexpr, tile: tl.constexpr
):
    """Return the smallest logit in (low, high] above which there is less weight than the share, by bisection.

    There is less above `high`, and not less above `low`.
    """
    low = _key(low) + 1
    high = _key(high)
    from_low = looked_at * group  # an upper bound of the logits at or above `low`, exact for those above `high`
    above_high = 0
    least = _unkey(low)  # the smallest of those at or above `low`, once that was raised
    while (low < high) & (from_low > above_high + 1):
        middle = _middle(low, high)
        mass, count, next_one = _look(logits, packed, chosen, looked_at, vocab_size, most, _unkey(middle), group, tile)
        enough = mass < share
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
        from_low = tl.where(enough, from_low, count)
        least = tl.where(enough, least, next_one)
        above_high = tl.where(enough, count, above_high)
    # a single remaining logit is the least, mostly long before the bounds meet
    return tl.where(from_low == above_high + 1, least, _unkey(low))


@triton.jit
def _estimate(
    logits, packed, chosen, looked_at, vocab_size, most, bound, counted, rest, group: tl.constexpr, tile: tl.constexpr
):
    """Return two numbers, with a logit between them up to which the weight from `counted` on is most likely `rest`.

    They are estimated from a sample of the chosen groups at regular intervals. The weight of its logits below a number
    differs from that of all by more than 4.5 standard deviations for one row in 100,000.

    """
    size: tl.constexpr = 2 * tile
    places = (tl.arange(0, size) * looked_at.to(tl.int64) // size).to(tl.int32)
    y = _scaled(logits, packed, tl.load(chosen + places), 2**26, vocab_size, group)
    y = tl.reshape(y, [size * group])
    weight = tl.where(y >= counted, _weights(y, most), 0.0)
    scale = looked_at.to(tl.float32) / size  # of the weight of all to the sample's
    rest = rest.to(tl.float32) / scale
    below = tl.maximum(_unkey(tl.maximum(_key(bound) - 1, LOWEST)), most - 104)  # exp(-104) is 0
    step = (most - below) / 4096
    steps, _ = _steps_below(y, weight, below, step, rest, rest, 7)
    lower = tl.where(y <= below + steps * step, weight, 0.0)
    mean = tl.sum(lower, 0) / (size * group)
    variance = tl.sum(lower * lower, 0) - mean * mean * (size * group)
    error = 4.5 * tl.sqrt(tl.maximum(variance, 0.0))
    first, last = _steps_below(y, weight, below, step, rest - error, rest + error, 12)
    low = below + first * step
    high = below + (last + 1) * step
    return low, tl.where(high < most - step, high, most)  # if most is infinite, step is not a number


@triton.jit
def _steps_below(y, weight, below, step, less, more, rounds: tl.constexpr):
    """Return the numbers of 4,096 steps from `below` up to which a sample's logits weigh at most two amounts."""
    low = 0
    high = 4096
    low_of_more = 0
    high_of_more = 4096
    for _ in range(rounds):
        middle = (low + high) // 2
        middle_of_more = (low_of_more + high_of_more) // 2
        both = tl.join(
            tl.where(y <= below + middle * step, weight, 0.0), tl.where(y <= below + middle_of_more * step, weight, 0.0)
        )
        mass, mass_of_more = tl.split(tl.sum(both, 0))
        low = tl.where(mass <= less, middle, low)
        high = tl.where(mass <= less, high, middle)
        low_of_more = tl.where(mass_of_more <= more, middle_of_more, low_of_more)
        high_of_more = tl.where(mass_of_more <= more, high_of_more, middle_of_more)
    return low, low_of_more


@triton.jit
def _listed(near, number, packed, most, start, listed: tl.constexpr):
    """Return the scaled logits that tiles listed from a place on and their weights, [all_tiles, listed].

    Where there are none, these are minus infinity and 0.
    """
    held = start + tl.arange(0, listed)[None, :] < number[:, None]
    y = _over_temperature(tl.load(near + start, held, 0.0), packed)
    return tl.where(held, y, -float("inf")), tl.where(held, _weights(y, most), 0.0)


@triton.jit
def _end_of_nucleus(y, weight, low, high, missing):
    """Return the smallest listed logit, all in (low, high], above which the listed ones weigh less than `missing`.

    The search is by bisection.
    """
    missing = missing.to(tl.float32)
    low = _key(low) + 1
    high = _key(high)
    while low < high:
        middle = _middle(low, high)
        enough = tl.sum(tl.where(y > _unkey(middle), weight, 0.0), 0) < missing
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return _unkey(low)


@triton.jit
def _end_of_long_lists(near, number, longest, packed, most, low, high, missing, listed: tl.constexpr):
    """Return the same of lists that are read anew for each step."""
    low = _key(low) + 1
    high = _key(high)
    while low < high:
        middle = _middle(low, high)
        mass = missing * 0
        for start in range(0, longest, listed):
            y, weight = _listed(near, number, packed, most, start, listed)
            mass += _total(tl.where(y > _unkey(middle), weight, 0.0))
        high = tl.where(mass < missing, middle, high)
        low = tl.where(mass < missing, low, middle + 1)
    return _unkey(low)


@triton.jit
def _kept_masses(
    logits, packed, chosen, sums, looked_at, vocab_size, most, bound, group: tl.constexpr, tile: tl.constexpr
):
    """Store the weight that each chosen group keeps to `sums`, by place in the list."""
    following = _tile(logits, packed, chosen, 0, looked_at, vocab_size, group, tile)
    for start in range(0, looked_at, tile):
        y = following  # the next ones come while these are summed up
        following = _tile(logits, packed, chosen, start + tile, looked_at, vocab_size, group, tile)
        places = start + tl.arange(0, tile)
        kept = tl.sum(tl.where(y >= bound, _weights(y, most), 0.0), 1)
        tl.store(sums + places, kept, places < looked_at)
