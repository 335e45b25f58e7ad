"""Paged attention compiled by numba: reads the cache in place, in its own dtype, and computes in float32.

Tensors cross from Python as addresses, so that a call costs microseconds and bfloat16, which numpy lacks, needs no
detour. Facts for the compiler are passed as *tags*, empty arrays that are passed only for their type. An element tag is
float32, uint16 for bfloat16, int16 for float16, int8, or uint8 for float8_e4m3fn and for two codes of four bits. A size
tag of n has the type ``S<n>``, so n is a constant.

All functions but those that the entry points get from `tiles` stay in this file, because the cache on disk notices a
change of the file with a function and of what its closure holds, but not of other files. Only entry points are cached
and get a wrapper for Python, and loops copy what slices could: both halve the time to compile. A function that is
called in one place and holds most of the others is inlined before it is compiled, or LLVM would optimise its code once
more by itself: a tenth of the time. Attention is compiled for one thread and called by its address from a loop over
threads that is compiled once: inside a parallel loop everything would be typed and optimised twice.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, config, njit, prange, set_num_threads, types
from numba.core import cgutils
from numba.extending import intrinsic

from slotline.backends.cache_codes import is_rotated
from slotline.backends.cpu import tiles
from slotline.backends.cpu.tiles import KEYS_AT_ONCE, MOST_WHOLE, TILE
from slotline.kernels.exponential import exp as _exp
from slotline.kernels.numba_cache import cached_cfunc, cached_njit

MIN_SPLIT = 64
"""Fewest keys that are worth a thread of their own."""
NO_SCORE = np.float32(-1e30)
"""Below any real score; finite, since the compiler is told that there are no infinities."""

TAGS = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.int8: np.empty(0, np.int8),
    torch.float8_e4m3fn: np.empty(0, np.uint8),
    torch.uint8: np.empty(0, np.uint8),
}
"""The element tag of each dtype."""
KINDS = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.uint8: "int4",
}
"""The kind of stored elements of each dtype, as `tiles.BYTES` has it."""
NO_SINKS = np.empty(0, np.float32)
NO_SLOPES = np.empty(0, np.float32)

# A piece: query tokens of one request that share one pass over its keys [START, END).
# The keys from KNOWN on are nodes of the request's tree.
REQUEST, FIRST_TOKEN, QUERY_LEN, START, END, KNOWN = range(6)
# An item: keys [FROM, TO) of one KV head of one piece; PARTIAL is where an unfinished result goes, -1 for none.
PIECE, HEAD, FROM, TO, PARTIAL = range(5)
# The shape of a layer and its cache, GROUP query heads per KV head; strides in elements. SCALED is 1 if keys and values
# are codes with scales [blocks, tokens, heads], the strides of which come last.
BLOCK, WINDOW, GROUP, K_BLOCK, K_TOKEN, K_HEAD, V_BLOCK, V_TOKEN, V_HEAD = range(9)
SCALED, KS_BLOCK, KS_TOKEN, KS_HEAD, VS_BLOCK, VS_TOKEN, VS_HEAD = range(9, 16)
# What a call of attention is told, all int64: addresses, numbers of elements, strides in elements. First of the plan,
ITEMS, PIECES, TABLES, TABLE_WIDTH, STARTS, THREADS, WORK, WORK_WIDTH, PARTS, PARTS_WIDTH = range(10)
# of its trees: bool masks and int64 depths, elements between requests, nodes of a mask's row,
SEES, SEES_STRIDE, DEPTHS, DEPTHS_STRIDE, NUM_NODES = range(10, 15)
# then of the layer and its cache,
SHAPE, SCALARS, SLOPES, NUM_SLOPES, KEYS, VALUES, KEY_SCALES, VALUE_SCALES = range(15, 23)
# then of the call.
SINKS, NUM_SINKS, QUERY, QUERY_STRIDE, OUT, OUT_STRIDE, LSE, LSE_STRIDE = range(23, 31)
# What a call of `turn` is told: address, then strides of a token and of a head of query and key; address and stride of
# a token of value; addresses of cosines and sines, elements between tokens and of one; numbers of a head that are
# rotated; addresses of the queries' and the keys' weights, 0 for none; addresses of the outputs and of the cache;
TURN_QUERY, TURN_KEY, TURN_VALUE, TURN_COS, TURN_SIN, TURN_STEP, TURN_WIDTH, TURN_ROTARY = 0, 3, 6, 8, 9, 10, 11, 12
TURN_WEIGHTS, TURN_OUT, TURN_CACHE, TURN_TOKENS, TURN_HEADS = 13, 15, 17, 19, 20
# and one of `finish`: address of what to finish; of the gate, 0 for none, with strides of a token and of a head; of the
# output; of scales, 0 for none; tokens, numbers of a token, scales of a token, numbers of a head.
FINISH_FROM, FINISH_GATE, FINISH_OUT, FINISH_SCALES = 0, 1, 4, 5
FINISH_TOKENS, FINISH_WIDTH, FINISH_GROUPS, FINISH_HEAD = range(6, 10)
STRIDE = 8
"""Offsets that are written at once."""
OFFSETS = TILE + STRIDE
"""Room for the offsets of a tile."""
NO_TREE = 1 << 40
"""`KNOWN` of a piece whose keys are no nodes."""


_inner = partial(njit, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
_inlined = partial(_inner, inline="always")
_entry = partial(cached_njit, nogil=True, no_cfunc_wrapper=True)


@intrinsic
def _pointer(typingctx: Any, address: Any, tag: Any) -> Any:
    """Return an address (int64) as a pointer to elements of `tag`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(tag.dtype)(types.int64, tag), codegen


@intrinsic
def _size(typingctx: Any, tag: Any) -> Any:
    """Return the constant in a size tag."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), tag.dtype.count)

    return types.int64(tag), codegen


@intrinsic
def _count_up(typingctx: Any, to: Any, first: Any, step: Any, count: Any) -> Any:
    """Write `first`, `first + step` and so on to an address, `count` numbers and up to `STRIDE` - 1 more."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to, first, step, count = args
        word, kind = ir.IntType(64), ir.VectorType(ir.IntType(64), STRIDE)
        empty = ir.Constant(kind, ir.Undefined)

        def splat(value: Any) -> Any:
            one = b.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
            return b.shuffle_vector(one, empty, ir.Constant(ir.VectorType(ir.IntType(32), STRIDE), [0] * STRIDE))

        steps = b.mul(splat(step), ir.Constant(kind, list(range(STRIDE))))
        with cgutils.for_range_slice(b, ir.Constant(word, 0), count, ir.Constant(word, STRIDE)) as (index, _):
            numbers = b.add(splat(b.add(first, b.mul(index, step))), steps)
            place = b.add(to, b.mul(index, ir.Constant(word, 8)))
            b.store(numbers, b.inttoptr(place, kind.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _call(typingctx: Any, address: Any, told: Any, thread: Any) -> Any:
    """Call the C function at an address with two numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [word, word]).as_pointer()
        builder.call(builder.inttoptr(args[0], function), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _widen(typingctx: Any, value: Any) -> Any:
    """Return a stored element as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        if value == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        word = ir.IntType(32)
        if value == types.int8:
            return builder.sitofp(builder.sext(args[0], word), ir.FloatType())
        if value == types.uint8:  # as float16 with the same bits, which is 2 ** 8 times smaller
            short = ir.IntType(16)
            bits = builder.zext(args[0], short)
            sign = builder.shl(builder.and_(bits, ir.Constant(short, 0x80)), ir.Constant(short, 8))
            rest = builder.shl(builder.and_(bits, ir.Constant(short, 0x7F)), ir.Constant(short, 7))
            half = builder.fpext(builder.bitcast(builder.or_(sign, rest), ir.HalfType()), ir.FloatType())
            return builder.fmul(half, ir.Constant(ir.FloatType(), 256.0))
        return builder.bitcast(builder.shl(builder.zext(args[0], word), ir.Constant(word, 16)), ir.FloatType())

    return types.float32(value), codegen


@intrinsic
def _narrow(typingctx: Any, value: Any, tag: Any) -> Any:
    """Return a float32 as an element of `tag`, rounded to nearest, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if tag.dtype == types.float32:
            return args[0]
        if tag.dtype == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))

    return tag.dtype(types.float32, tag), codegen


@_inner(fastmath=True)
def _tanh(x: Any) -> Any:
    """Return tanh of a float32: the Cephes polynomial (tanhf) near zero, by exp elsewhere."""
    z = x * x
    y = np.float32(-5.70498872745e-3) * z + np.float32(2.06390887954e-2)
    y = y * z + np.float32(-5.37397155531e-2)
    y = y * z + np.float32(1.33314422036e-1)
    y = (y * z + np.float32(-3.33332819422e-1)) * z * x + x
    e = _exp(np.float32(-2.0) * abs(x))
    far = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    far = far if x >= np.float32(0.0) else -far
    return y if abs(x) < np.float32(0.625) else far


def use_threads(wanted: int) -> int:
    """Let kernels run on `wanted` threads, or as many as numba has, and return the number."""
    threads = max(1, min(wanted, int(config.NUMBA_NUM_THREADS)))
    set_num_threads(threads)
    return threads


@_entry()
def cut_rows(slots: Any, block_size: Any, rows: Any) -> Any:
    """Fill `rows` [n, 3] with (token, block, offset) of tokens with a slot of 0 or more, and return their number."""
    count = 0
    for token in range(slots.shape[0]):
        slot = slots[token]
        if slot >= 0:
            block = slot // block_size
            rows[count, 0], rows[count, 1], rows[count, 2] = token, block, slot - block * block_size
            count += 1
    return count


@_entry()
def cut_pieces(
    query_start: Any, seq_lens: Any, nodes: Any, max_rows: Any, longest: Any, window: Any, pieces: Any
) -> Any:
    """Fill `pieces` [n, 6] with the queries of requests of at most `longest` query tokens, `max_rows` tokens each.

    `nodes` [requests] are the last tokens of each that are nodes of a tree. Such a request may have more query tokens.
    Returns their number. Requests without query tokens or keys have no piece.
    """
    count = 0
    for request in range(seq_lens.shape[0]):
        first, end, keys = query_start[request], query_start[request + 1], seq_lens[request]
        if keys == 0 or (end - first > longest and nodes[request] == 0):
            continue
        known = keys - nodes[request] if nodes[request] > 0 else NO_TREE
        while first < end:
            rows = min(max_rows, end - first)
            seen = keys - (end - first - rows)
            start = max(0, min(seen - rows, known) + 1 - window) if window > 0 else 0
            piece = pieces[count]
            piece[REQUEST], piece[FIRST_TOKEN], piece[QUERY_LEN] = request, first, rows
            piece[START], piece[END], piece[KNOWN] = start, seen, known
            count += 1
            first += rows
    return count


@_entry()
def partition(pieces: Any, kv_heads: Any, threads: Any, min_split: Any, items: Any, starts: Any) -> Any:
    """Divide the keys of all pieces among `threads`, equally and in order, and fill `items` and `starts` [threads + 1].

    A KV head of a piece is divided only if one thread's share ends inside it, and both parts have at least `min_split`
    keys. Returns the number of partial results, which are numbered in the order of the items.
    """
    total = 0
    for piece in pieces:
        total += piece[QUERY_LEN] * (piece[END] - piece[START] + TILE) * kv_heads
    thread, count, partials, done = 1, 0, 0, 0
    starts[0] = 0
    for index in range(pieces.shape[0]):
        rows, end = pieces[index, QUERY_LEN], pieces[index, END]
        for head in range(kv_heads):
            at, cut = pieces[index, START], False
            while at < end:
                share = (total * thread // threads - done) // rows  # keys until this thread has its part
                share = max(0, share) // TILE * TILE
                stop = end
                if thread < threads and share < end - at:
                    if share >= min_split and end - at - share >= min_split:
                        stop, cut = at + share, True
                    elif share < (end - at) // 2:
                        starts[thread] = count
                        thread += 1
                        continue
                item = items[count]
                item[PIECE], item[HEAD], item[FROM], item[TO] = index, head, at, stop
                item[PARTIAL] = partials if cut else -1
                partials += 1 if cut else 0
                count += 1
                done += rows * (stop - at + (TILE if stop == end else 0))
                at = stop
                if at < end:
                    starts[thread] = count
                    thread += 1
    for rest in range(thread, threads + 1):
        starts[rest] = count
    return partials


@_inner(fastmath=True)
def _mask_row(scores: Any, low: Any, high: Any, soft_cap: Any, slope: Any, own: Any, hidden: Any) -> None:
    """Hide what one row of scores [TILE], visible from `low` to `high`, does not see, after soft cap and slope.

    Keys that are `hidden` [high or 0] are not visible either.
    `own` is the index in the tile of the row's own key, from which ALiBi's `slope` counts.
    """
    for j in range(low):
        scores[j] = NO_SCORE
    for j in range(high, TILE):
        scores[j] = NO_SCORE
    if soft_cap > np.float32(0.0):
        for j in range(low, high):
            scores[j] = soft_cap * _tanh(scores[j] / soft_cap)
    if slope != np.float32(0.0):
        for j in range(low, high):
            scores[j] += slope * np.float32(j - own)
    for j in range(hidden.shape[0]):
        if hidden[j]:
            scores[j] = NO_SCORE


@_inner(fastmath=True)
def _find_tile(
    table: Any, at: Any, count: Any, shape: Any, head: Any, offsets: Any, all_scales: Any, factors: Any
) -> None:
    """Write the offsets in the cache [2, OFFSETS], in elements, of keys `at` .. `at + count` and their values.

    Behind the last come copies of it, up to a multiple of `KEYS_AT_ONCE`. Scales become factors [2, TILE], which stay
    ones without scales.
    """
    block_size = shape[BLOCK]
    key_scales, value_scales = all_scales
    k_token, v_token, ks_token, vs_token = shape[K_TOKEN], shape[V_TOKEN], shape[KS_TOKEN], shape[VS_TOKEN]
    of_keys, of_values = offsets.ctypes.data, offsets.ctypes.data + OFFSETS * 8
    block = at // block_size
    offset, j = at - block * block_size, 0
    while j < count:
        number, end = np.int64(table[block]), min(count, j + block_size - offset)
        key = number * shape[K_BLOCK] + head * shape[K_HEAD] + (offset - j) * k_token
        value = number * shape[V_BLOCK] + head * shape[V_HEAD] + (offset - j) * v_token
        _count_up(of_keys + j * 8, key + j * k_token, k_token, end - j)
        _count_up(of_values + j * 8, value + j * v_token, v_token, end - j)
        if shape[SCALED]:
            key = number * shape[KS_BLOCK] + head * shape[KS_HEAD] + (offset - j) * ks_token
            value = number * shape[VS_BLOCK] + head * shape[VS_HEAD] + (offset - j) * vs_token
            for place in range(j, end):
                factors[place] = key_scales[key + place * ks_token]
                factors[TILE + place] = value_scales[value + place * vs_token]
        block, offset, j = block + 1, 0, end
    for j in range(count, (count + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE * KEYS_AT_ONCE):
        offsets[j], offsets[OFFSETS + j] = offsets[count - 1], offsets[OFFSETS + count - 1]


@_inner(fastmath=True)
def _round_rows(source: Any, target: Any, scales: Any, num_rows: Any, size: Any) -> None:
    """Round rows [num_rows, size] of float32 to int16 with a scale for each."""
    for row in range(num_rows):
        part, rounded = source[row * size : row * size + size], target[row * size : row * size + size]
        largest = np.float32(0.0)
        for d in range(size):
            largest = max(largest, abs(part[d]))
        factor = np.float32(MOST_WHOLE) / largest if largest > np.float32(1e-30) else np.float32(0.0)
        scales[row] = largest / np.float32(MOST_WHOLE)
        for d in range(size):
            rounded[d] = np.int16(np.int32(np.floor(part[d] * factor + np.float32(0.5))))


@_inner()
def _width(size_tag: Any, rotated: Any) -> Any:
    """Return the elements of a vector in the kernel: two rotated codes are in a byte."""
    size = _size(size_tag)
    return size + size % 2 if rotated else size


@_inlined()
def _run_item(
    item: Any,
    piece: Any,
    table: Any,
    behind: Any,
    trees: Any,
    layer: Any,
    cache: Any,
    work: Any,
    result: Any,
    tags: Any,
    score: Any,
    soften: Any,
    add: Any,
) -> None:
    """Compute one item by online softmax. acc [rows * group, size_v], top and norm [rows * group] stay unnormalised.

    While a tile is computed, keys and values of the next one are fetched. Behind the last one that is the first tile of
    the item `behind`, which has a table of its own.
    """
    shape, scalars, _, slopes = layer
    keys, values, key_scales, value_scales = cache
    query, scores, offsets, factors, rounded, weights, scales = work
    acc, top, norm = result
    size_v, whole, whole_values = tags
    rows, head, window, group = piece[QUERY_LEN], item[HEAD], shape[WINDOW], shape[GROUP]
    for row in range(rows * group):
        top[row], norm[row] = NO_SCORE, np.float32(0.0)
    for x in range(rows * group * size_v):
        acc[x] = np.float32(0.0)
    of_query, of_scores = rounded.ctypes.data if whole else query.ctypes.data, scores.ctypes.data
    of_weights = weights.ctypes.data if whole_values else of_scores
    of_acc, of_top, of_norm = acc.ctypes.data, top.ctypes.data, norm.ctypes.data
    sees, depths, num_nodes = trees
    known = piece[KNOWN]
    hidden = np.zeros(TILE, np.bool_)
    changes = scalars[1] > np.float32(0.0) or slopes.shape[0] > 0  # scores that all rows see
    all_scales, next_item, next_table = (key_scales, value_scales), behind[0], behind[1]
    side, begin, end, next_head = 0, item[FROM], item[TO], head
    _find_tile(table, begin, min(TILE, end - begin), shape, head, offsets[0], all_scales, factors[0])
    for at in range(item[FROM], item[TO], TILE):
        count = min(TILE, item[TO] - at)
        begin += TILE
        if begin >= end:
            table, next_head, begin, end = next_table, next_item[HEAD], next_item[FROM], next_item[TO]
        other = 1 - side
        _find_tile(table, begin, min(TILE, end - begin), shape, next_head, offsets[other], all_scales, factors[other])
        of_keys, ahead, of_factors = offsets[side].ctypes.data, offsets[other].ctypes.data, factors[side].ctypes.data
        of_scales = scales.ctypes.data
        score(of_query, keys.ctypes.data, of_keys, of_scores, of_scales, of_factors, count, rows * group, ahead)
        for i in range(rows):
            last = piece[END] - rows + i
            high = min(count, last + 1 - at)
            place = last if last < known else known + depths[last - known]
            low = max(0, place - window + 1 - at) if window > 0 else 0
            masked = 0
            if at + high > known:
                masked = high
                for j in range(low, high):
                    node = at + j - known
                    away = node >= 0 and window > 0 and known + depths[node] <= place - window
                    hidden[j] = node >= 0 and (away or not sees[(last - known) * num_nodes + node])
            for row in range(i * group, i * group + group):
                line = scores[row * TILE : row * TILE + TILE]
                if low >= high:
                    for j in range(TILE):
                        line[j], weights[row * TILE + j] = np.float32(0.0), 0
                    continue
                slope = slopes[head * group + row - i * group] if slopes.shape[0] > 0 else np.float32(0.0)
                if changes or low > 0 or high < TILE or masked > 0:
                    _mask_row(line, low, high, scalars[1], slope, last - at, hidden[:masked])
                soften(
                    *(of_scores + row * TILE * 4, of_top + row * 4, of_norm + row * 4, of_acc + row * size_v * 4),
                    *(of_factors + TILE * 4, weights.ctypes.data + row * TILE * 2),
                )
        of_values, ahead = of_keys + OFFSETS * 8, ahead + OFFSETS * 8
        add(of_weights, of_acc, values.ctypes.data, of_values, of_scores, count, rows * group, ahead)
        side = other


@_inner(fastmath=True)
def _rotate(vector: Any, size: Any) -> None:
    """Rotate a vector in place as `cache_codes.rotate` does."""
    piece, step = size & -size, 1
    while step < piece:
        for begin in range(0, size, 2 * step):
            for i in range(begin, begin + step):
                first, second = vector[i], vector[i + step]
                vector[i], vector[i + step] = first + second, first - second
        step *= 2


@_inner(fastmath=True)
def _load_query(
    source: Any, piece: Any, head: Any, stride: Any, scale: Any, query: Any, group: Any, size: Any, rotated: Any
) -> None:
    """Load the query vectors of one KV head, widened and scaled: query [rows * group, size] float32.

    Rotated ones have the even elements in front of the odd ones, of which the last is a zero if `size` is odd.
    """
    width = size + size % 2 if rotated else size  # as `_width`
    turned = np.zeros(width, np.float32)
    for i in range(piece[QUERY_LEN]):
        for g in range(group):
            begin, row = (piece[FIRST_TOKEN] + i) * stride + (head * group + g) * size, i * group + g
            part, target = source[begin : begin + size], query[row * width : row * width + width]
            if rotated:
                for d in range(size):
                    turned[d] = _widen(part[d]) * scale
                _rotate(turned, size)
                for d in range(width // 2):
                    target[d], target[width // 2 + d] = turned[2 * d], turned[2 * d + 1]
            else:
                for d in range(size):
                    target[d] = _widen(part[d]) * scale


@_inner(fastmath=True)
def _store(
    piece: Any, head: Any, result: Any, sinks: Any, targets: Any, tag: Any, group: Any, size_tag: Any, coded: Any
) -> None:
    """Normalise a finished result, the sinks counted in, and write it to the output and the log-sum-exp.

    `coded` has the factor of the values, and if they are rotated.
    """
    acc, top, norm = result
    out, out_stride, lse, lse_stride = targets
    size, (unit, rotated) = _size(size_tag), coded
    width = _width(size_tag, rotated)
    turned = np.empty(width, np.float32)
    for i in range(piece[QUERY_LEN]):
        token = piece[FIRST_TOKEN] + i
        for g in range(group):
            row, query_head = i * group + g, head * group + g
            best, total, shrink = top[row], norm[row], np.float32(1.0)
            if sinks.shape[0] > 0:
                best = max(best, sinks[query_head])
                shrink = _exp(top[row] - best)
                total = total * shrink + _exp(sinks[query_head] - best)
            lse[query_head * lse_stride + token] = best + np.float32(math.log(total))
            factor = unit * shrink / total
            begin = token * out_stride + query_head * size
            place = out[begin : begin + size]
            sums = acc[row * width : row * width + width]
            if rotated:
                for d in range(width // 2):
                    turned[2 * d], turned[2 * d + 1] = sums[d], sums[width // 2 + d]
                _rotate(turned, size)
                for d in range(size):
                    sums[d] = turned[d]
            for d in range(size):
                place[d] = _narrow(sums[d] * factor, tag)


@_inner(fastmath=True)
def _merge(into: Any, other: Any, num_rows: Any, size: Any) -> None:
    """Merge one unnormalised result into another (Milakov and Gimelshein 2018, section 3.1)."""
    into_acc, into_top, into_norm = into
    acc, top, norm = other
    for row in range(num_rows):
        best = max(into_top[row], top[row])
        keep, add = _exp(into_top[row] - best), _exp(top[row] - best)
        into_top[row] = best
        into_norm[row] = into_norm[row] * keep + norm[row] * add
        for d in range(row * size, row * size + size):
            into_acc[d] = into_acc[d] * keep + acc[d] * add


@_inner()
def _split_result(part: Any, max_rows: Any, size: Any) -> Any:
    """Return views acc, top, norm of a flat buffer of max_rows * (size + 2) floats."""
    end = max_rows * size
    return part[:end], part[end : end + max_rows], part[end + max_rows : end + 2 * max_rows]


@_inlined()
def _run_thread(
    thread: Any,
    plan: Any,
    trees: Any,
    layer: Any,
    cache: Any,
    query: Any,
    targets: Any,
    tags: Any,
    score: Any,
    soften: Any,
    add: Any,
) -> None:
    """Run one thread's items. Finished ones go to the targets, the others to the plan's partial results."""
    items, starts, pieces, tables, work, parts = plan
    tag, size_tag, size_v_tag, coded, whole, whole_values = tags
    group, size, size_v = layer[0][GROUP], _width(size_tag, coded[1]), _width(size_v_tag, coded[1])
    source, query_stride = query
    room = work[thread]
    max_rows = parts.shape[1] // (size_v + 2)
    own = _split_result(room, max_rows, size_v)
    rest = room[max_rows * (size_v + 2) :]
    query_rows, scores = rest[: max_rows * size], rest[max_rows * size : max_rows * (size + TILE)]
    rounded, weights = np.empty(max_rows * size, np.int16), np.empty(max_rows * TILE, np.int16)
    scales, offsets, factors = (
        np.empty(max_rows, np.float32),
        np.zeros((2, 2 * OFFSETS), np.int64),
        np.ones((2, 2 * TILE), np.float32),
    )
    scratch = (query_rows, scores, offsets, factors, rounded, weights, scales)
    for index in range(starts[thread], starts[thread + 1]):
        item = items[index]
        piece = pieces[item[PIECE]]
        head, table = item[HEAD], tables[piece[REQUEST]]
        following = items[min(index + 1, starts[thread + 1] - 1)]
        _load_query(
            source, piece, head, query_stride, layer[1][0] * coded[0], query_rows, group, _size(size_tag), coded[1]
        )
        if whole:
            _round_rows(query_rows, rounded, scales, piece[QUERY_LEN] * group, size)
        result = own if item[PARTIAL] < 0 else _split_result(parts[item[PARTIAL]], max_rows, size_v)
        nodes = trees[4]
        see_at, depth_at = piece[REQUEST] * trees[1], piece[REQUEST] * trees[3]
        tree = (trees[0][see_at : see_at + nodes * nodes], trees[2][depth_at : depth_at + nodes], nodes)
        _run_item(
            item,
            piece,
            table,
            (following, tables[pieces[following[PIECE], REQUEST]]),
            tree,
            layer,
            cache,
            scratch,
            result,
            (size_v, whole, whole_values),
            score,
            soften,
            add,
        )
        if item[PARTIAL] < 0:
            _store(piece, head, result, layer[2], targets, tag, group, size_v_tag, coded)


@_inlined()
def _finish_partials(plan: Any, layer: Any, targets: Any, tags: Any) -> None:
    """Merge the partial results of each KV head of a piece, which are neighbours, and store them."""
    items, starts, pieces, _, _, parts = plan
    tag, _, size_v_tag, coded, _, _ = tags
    group, size_v = layer[0][GROUP], _width(size_v_tag, coded[1])
    max_rows = parts.shape[1] // (size_v + 2)
    count, index = starts[starts.shape[0] - 1], 0
    while index < count:
        first = items[index]
        index += 1
        if first[PARTIAL] < 0:
            continue
        piece = pieces[first[PIECE]]
        into = _split_result(parts[first[PARTIAL]], max_rows, size_v)
        while index < count and items[index, PIECE] == first[PIECE] and items[index, HEAD] == first[HEAD]:
            other = _split_result(parts[items[index, PARTIAL]], max_rows, size_v)
            _merge(into, other, piece[QUERY_LEN] * group, size_v)
            index += 1
        _store(piece, first[HEAD], into, layer[2], targets, tag, group, size_v_tag, coded)


@_inner()
def _copy_rows(rows: Any, source: Any, token_stride: Any, target: Any, strides: Any, heads: Any, size: Any) -> None:
    """Copy tokens [heads, size] to blocks and offsets. `rows` [n, 3] has token, block and offset."""
    for index in range(rows.shape[0]):
        begin = rows[index, 0] * token_stride
        place = rows[index, 1] * strides[0] + rows[index, 2] * strides[1]
        for _ in range(heads):
            row, stored = source[begin : begin + size], target[place : place + size]
            for d in range(size):
                stored[d] = row[d]
            begin += size
            place += strides[2]


@_inner()
def _encode_rows(
    rows: Any, source: Any, token_stride: Any, codes: Any, scales: Any, strides: Any, heads: Any, size: Any
) -> None:
    """Store tokens [heads, size] as int8 codes and one scale for each head, as the format ``int8_token_head`` says.

    `strides` are those of codes (block, token, head), then of scales. Not compiled as fast mathematics: adding and
    subtracting 1.5 * 2 ** 23 rounds to nearest even.
    """
    magic = np.float32(12582912.0)
    for index in range(rows.shape[0]):
        begin = rows[index, 0] * token_stride
        place = rows[index, 1] * strides[0] + rows[index, 2] * strides[1]
        at = rows[index, 1] * strides[3] + rows[index, 2] * strides[4]
        for _ in range(heads):
            row, stored = source[begin : begin + size], codes[place : place + size]
            largest = np.float32(0.0)
            for d in range(size):
                largest = max(largest, abs(_widen(row[d])))
            scale = max(largest / np.float32(127.0), np.float32(1.1754944e-38))
            scales[at] = scale
            for d in range(size):
                stored[d] = np.int8((_widen(row[d]) / scale + magic) - magic)
            begin += size
            place += strides[2]
            at += strides[5]


@_entry(parallel=True, fastmath=True)
def soften(scores_at: Any, weights_at: Any, lse_at: Any, shape: Any, sinks: Any, tag: Any) -> None:
    """Apply the causal softmax to one block of queries: scores [rows, keys] float32 to weights [rows, keys] of `tag`.

    Row r is query token r % size of query head r // size and sees the keys up to first + r % size. The others get
    weight 0. `shape` is (rows, keys, first, size, elements between heads in the log-sum-exp, its first token). The
    log-sum-exp [heads, tokens] float32 is written too. Weights and scores may be the same array. Sinks as in `attend`.
    """
    rows, keys, first, size, lse_stride, token = shape
    unbounded = 1 << 60
    all_scores = carray(_pointer(scores_at, lse_at[1]), unbounded)
    all_weights = carray(_pointer(weights_at, tag), unbounded)
    lse = carray(_pointer(lse_at[0], lse_at[1]), unbounded)
    for row in prange(rows):
        scores, weights = all_scores[row * keys : row * keys + keys], all_weights[row * keys : row * keys + keys]
        head = row // size
        seen = first + row - head * size + 1
        best = NO_SCORE
        for j in range(seen):
            best = max(best, scores[j])
        if sinks.shape[0] > 0:
            best = max(best, sinks[head])
        total = np.float32(0.0)
        for j in range(seen):
            weight = _exp(scores[j] - best)
            scores[j] = weight
            total += weight
        if sinks.shape[0] > 0:
            total += _exp(sinks[head] - best)
        factor = np.float32(1.0) / total
        for j in range(seen):
            weights[j] = _narrow(scores[j] * factor, tag)
        for j in range(seen, keys):
            weights[j] = _narrow(np.float32(0.0), tag)
        lse[head * lse_stride + token + row - head * size] = best + np.float32(math.log(total))


@_entry(parallel=True)
def attend(address: Any, told: Any, threads: Any) -> None:
    """Compute attention of every piece of a plan over the cache of one layer.

    Args:
        address: of what `compile_attend` made.
        told: [31] int64, see `ITEMS` and the constants after it.
        threads: among which the plan is shared.
    """
    for thread in prange(threads):
        _call(address, told.ctypes.data, np.int64(thread))
    _call(address, told.ctypes.data, -1)


@cache
def compile_attend(size: int, size_v: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Any:
    """Compile a C function of `told`'s address and a thread, for keys of `size` and values of `size_v` elements.

    It computes the thread's share. For thread -1, after all others, it merges the partial results. Arrays: items [n,
    5], starts [threads + 1], pieces [p, 6] and shape int64, block tables [requests, blocks] int32, work [threads, .],
    partial results [., max_rows * (size_v + 2)], (scale, soft cap or 0), slopes and sinks [heads] or empty float32,
    query and output of `dtype`, keys and values of `cache_dtype`, the log-sum-exp float32.
    """
    size_tag, size_v_tag = (np.empty(0, f"S{n}") for n in (size, size_v))
    kind, short = KINDS[cache_dtype], dtype != torch.float32
    rotated = is_rotated(cache_dtype)
    of_keys, of_values = (tiles.form(kind, n + n % 2 if rotated else n, short=short) for n in (size, size_v))
    score, soften, add = tiles.score_tile(of_keys), tiles.soften_tile(of_values), tiles.add_values(of_values)
    whole, whole_values, unit = of_keys.whole, of_values.whole, np.float32(tiles.UNIT.get(kind, 1.0))
    q_tag, kv_tag = TAGS[dtype], TAGS[cache_dtype]
    ints, ids, floats, bools = (np.empty(0, kind) for kind in (np.int64, np.int32, np.float32, np.bool_))

    def share(told_at: Any, thread: Any) -> None:
        many, unbounded = 1 << 40, 1 << 60
        told = carray(_pointer(told_at, ints), unbounded)
        plan = (
            carray(_pointer(told[ITEMS], ints), (many, 5)),
            carray(_pointer(told[STARTS], ints), told[THREADS] + 1),
            carray(_pointer(told[PIECES], ints), (many, 6)),
            carray(_pointer(told[TABLES], ids), (many, told[TABLE_WIDTH])),
            carray(_pointer(told[WORK], floats), (many, told[WORK_WIDTH])),
            carray(_pointer(told[PARTS], floats), (many, told[PARTS_WIDTH])),
        )
        trees = (
            carray(_pointer(told[SEES], bools), unbounded),
            told[SEES_STRIDE],
            carray(_pointer(told[DEPTHS], ints), unbounded),
            told[DEPTHS_STRIDE],
            told[NUM_NODES],
        )
        layer = (
            carray(_pointer(told[SHAPE], ints), unbounded),
            carray(_pointer(told[SCALARS], floats), unbounded),
            carray(_pointer(told[SINKS], floats), told[NUM_SINKS]),
            carray(_pointer(told[SLOPES], floats), told[NUM_SLOPES]),
        )
        cache = (
            carray(_pointer(told[KEYS], kv_tag), unbounded),
            carray(_pointer(told[VALUES], kv_tag), unbounded),
            carray(_pointer(told[KEY_SCALES], floats), unbounded),
            carray(_pointer(told[VALUE_SCALES], floats), unbounded),
        )
        query = (carray(_pointer(told[QUERY], q_tag), unbounded), told[QUERY_STRIDE])
        out, lse = carray(_pointer(told[OUT], q_tag), unbounded), carray(_pointer(told[LSE], floats), unbounded)
        targets = (out, told[OUT_STRIDE], lse, told[LSE_STRIDE])
        tags = (q_tag, size_tag, size_v_tag, (unit, rotated), whole, whole_values)
        if thread >= 0:
            _run_thread(thread, plan, trees, layer, cache, query, targets, tags, score, soften, add)
        else:
            _finish_partials(plan, layer, targets, tags)

    return cached_cfunc(types.void(types.int64, types.int64), share)


@cache
def compile_store(size: int, size_v: int) -> Any:
    """Compile the entry point that stores keys of `size` and values of `size_v` elements, both constants for it."""

    @_entry()
    def store(rows: Any, kv_heads: Any, shape: Any, addresses: Any, strides: Any, tag: Any) -> None:
        """Write new keys and values, elements of `tag`, to `rows` [n, 3] (token, block, offset).

        `addresses` are those of key, value, and the first key and value of the cache. `strides` are those of a token in
        the first two.
        """
        unbounded = 1 << 60
        key, value = carray(_pointer(addresses[0], tag), unbounded), carray(_pointer(addresses[1], tag), unbounded)
        keys, values = carray(_pointer(addresses[2], tag), unbounded), carray(_pointer(addresses[3], tag), unbounded)
        _copy_rows(rows, key, strides[0], keys, shape[K_BLOCK : K_HEAD + 1], kv_heads, size)
        _copy_rows(rows, value, strides[1], values, shape[V_BLOCK : V_HEAD + 1], kv_heads, size_v)

    return store


@cache
def compile_encode(size: int, size_v: int) -> Any:
    """Compile the entry point that stores keys of `size` and values of `size_v` elements as int8 codes with scales."""

    @_entry()
    def encode(rows: Any, kv_heads: Any, shape: Any, addresses: Any, strides: Any, tag: Any) -> None:
        """Write new keys and values, elements of `tag`, to `rows` [n, 3] (token, block, offset).

        `addresses` are those of key and value, then of the cache's first key, value, and scale of each. `strides` are
        those of a token in key and value.
        """
        unbounded = 1 << 60
        codes, floats = np.empty(0, np.int8), np.empty(0, np.float32)
        key, value = carray(_pointer(addresses[0], tag), unbounded), carray(_pointer(addresses[1], tag), unbounded)
        keys, values = (
            carray(_pointer(addresses[2], codes), unbounded),
            carray(_pointer(addresses[3], codes), unbounded),
        )
        k_scales, v_scales = (
            carray(_pointer(addresses[4], floats), unbounded),
            carray(_pointer(addresses[5], floats), unbounded),
        )
        of_keys, of_values = np.empty(6, np.int64), np.empty(6, np.int64)
        for i in range(3):
            of_keys[i], of_keys[3 + i] = shape[K_BLOCK + i], shape[KS_BLOCK + i]
            of_values[i], of_values[3 + i] = shape[V_BLOCK + i], shape[VS_BLOCK + i]
        _encode_rows(rows, key, strides[0], keys, k_scales, of_keys, kv_heads, size)
        _encode_rows(rows, value, strides[1], values, v_scales, of_values, kv_heads, size_v)

    return encode


@_inlined(fastmath=True)
def _turn_head(
    source: Any,
    norm: Any,
    weight: Any,
    factors: Any,
    angles: Any,
    rotary: Any,
    out: Any,
    room: Any,
    spun: Any,
    tag: Any,
) -> None:
    """Norm one head [size] if there is a weight, rotate its first `rotary` numbers, and write it to `out` [size].

    `factors` are epsilon and offset. `angles` [2 * rotary] are cosines and sines of the first numbers of pairs, then of
    the second ones. Each loop has few arrays, or the compiler would not make vectors of it.
    """
    size, half = source.shape[0], rotary // 2
    for d in range(size):
        room[d] = _widen(source[d])
    if norm:
        total = np.float32(0.0)
        for d in range(size):
            total += room[d] * room[d]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + factors[0])
        for d in range(size):
            room[d] = room[d] * factor * (factors[1] + _widen(weight[d]))
    a, b, first, second = room[:half], room[half:rotary], spun[:half], spun[half:rotary]
    cos, sin = angles[:half], angles[half:rotary]
    for i in range(half):
        first[i] = a[i] * cos[i] - b[i] * sin[i]
    cos, sin = angles[rotary : rotary + half], angles[rotary + half : 2 * rotary]
    for i in range(half):
        second[i] = b[i] * cos[i] + a[i] * sin[i]
    for d in range(rotary):
        out[d] = _narrow(spun[d], tag)
    for d in range(rotary, size):
        out[d] = _narrow(room[d], tag)


@_inlined(fastmath=True)
def _turn_rows(
    told: Any, which: Any, address: Any, strides: Any, heads: Any, factors: Any, out: Any, size: Any, tag: Any
) -> None:
    """Norm and rotate all heads of queries (`which` 0) or keys (1), into `out` [tokens, heads, size]."""
    unbounded, rotary = 1 << 60, told[TURN_ROTARY]
    half, second = rotary // 2, told[TURN_WIDTH] - rotary // 2
    source = carray(_pointer(address, tag), unbounded)
    cos, sin = carray(_pointer(told[TURN_COS], tag), unbounded), carray(_pointer(told[TURN_SIN], tag), unbounded)
    weights = carray(_pointer(told[TURN_WEIGHTS + which], tag), unbounded)
    norm, weight = told[TURN_WEIGHTS + which] != 0, weights[:size]
    room, spun, angles = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(2 * size, np.float32)
    for token in range(told[TURN_TOKENS]):
        at = token * told[TURN_STEP]
        for i in range(half):
            angles[i], angles[half + i] = _widen(cos[at + i]), _widen(sin[at + i])
        at += second
        for i in range(half):
            angles[rotary + i], angles[rotary + half + i] = _widen(cos[at + i]), _widen(sin[at + i])
        for head in range(heads):
            begin, place = token * strides[0] + head * strides[1], (token * heads + head) * size
            row, turned = source[begin : begin + size], out[place : place + size]
            _turn_head(row, norm, weight, factors, angles, rotary, turned, room, spun, tag)


@cache
def compile_turn(size: int, size_v: int) -> Any:
    """Compile the entry point that norms and rotates heads of `size` and stores them beside values of `size_v`."""

    @_entry(fastmath=True)
    def turn(told: Any, factors: Any, rows: Any, shape: Any, tag: Any) -> None:
        """Norm and rotate queries and keys, elements of `tag`, and store keys and values to `rows` [n, 3].

        `told` are addresses and sizes in the order of `TURN_QUERY` and those after it. `factors` [4] float32 are
        epsilon and offset of the queries' norm, then of the keys'. `rows` may be empty.
        """
        unbounded = 1 << 60
        heads, kv_heads = told[TURN_HEADS], told[TURN_HEADS + 1]
        query, key = (
            carray(_pointer(told[TURN_OUT], tag), unbounded),
            carray(_pointer(told[TURN_OUT + 1], tag), unbounded),
        )
        _turn_rows(told, 0, told[TURN_QUERY], told[TURN_QUERY + 1 :], heads, factors, query, size, tag)
        _turn_rows(told, 1, told[TURN_KEY], told[TURN_KEY + 1 :], kv_heads, factors[2:], key, size, tag)
        value, values = (
            carray(_pointer(told[TURN_VALUE], tag), unbounded),
            carray(_pointer(told[TURN_CACHE + 1], tag), unbounded),
        )
        keys = carray(_pointer(told[TURN_CACHE], tag), unbounded)
        _copy_rows(rows, key, kv_heads * size, keys, shape[K_BLOCK : K_HEAD + 1], kv_heads, size)
        _copy_rows(rows, value, told[TURN_VALUE + 1], values, shape[V_BLOCK : V_HEAD + 1], kv_heads, size_v)

    return turn


@_entry()
def finish(told: Any, tag: Any) -> None:
    """Gate outputs, elements of `tag`, and write them to an output of `tag` or, with scales, to one of int8.

    `told` are addresses and sizes in the order of `FINISH_FROM` and those after it.
    """
    unbounded, codes_tag, float_tag = 1 << 60, np.empty(0, np.int8), np.empty(0, np.float32)
    source, gates = (
        carray(_pointer(told[FINISH_FROM], tag), unbounded),
        carray(_pointer(told[FINISH_GATE], tag), unbounded),
    )
    out, codes = (
        carray(_pointer(told[FINISH_OUT], tag), unbounded),
        carray(_pointer(told[FINISH_OUT], codes_tag), unbounded),
    )
    scales = carray(_pointer(told[FINISH_SCALES], float_tag), unbounded)
    width, groups, head = told[FINISH_WIDTH], told[FINISH_GROUPS], told[FINISH_HEAD]
    size = width // groups
    room = np.empty(size, np.float32)
    for token in range(told[FINISH_TOKENS]):
        for group in range(groups):
            begin, high = token * width + group * size, np.float32(0.0)
            for d in range(size):
                value = _widen(source[begin + d])
                if told[FINISH_GATE] != 0:
                    place = group * size + d
                    at = token * told[FINISH_GATE + 1] + place // head * told[FINISH_GATE + 2] + place % head
                    value /= np.float32(1.0) + np.float32(math.exp(-_widen(gates[at])))
                room[d] = value
                high = max(high, abs(value))
            if told[FINISH_SCALES] == 0:
                for d in range(size):
                    out[begin + d] = _narrow(room[d], tag)
            else:
                scale = high / np.float32(127.0)
                scales[token * groups + group] = scale
                factor = np.float32(127.0) / high if high > np.float32(0.0) else np.float32(0.0)
                for d in range(size):
                    codes[begin + d] = np.int8(np.rint(room[d] * factor))
