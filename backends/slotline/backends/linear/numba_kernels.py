"""Products with codes of eight and four bits on a CPU, compiled by numba: codes are widened on the fly.

A row's codes are read once, sixteen at a time, converted to float32 in registers and multiplied by the inputs. So a
product of one token takes the time of reading the codes. For a few tokens a row is dequantized once into a scratch row
that stays in the cache. Functions are called by address with an array of numbers, see `CODES` and the constants after
it, once for each thread.

A group's codes are in two halves, which two chains of sums take. With four bits a byte holds one code of the first half
(low) and one of the second.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic

from slotline.kernels.numba_cache import cached_cfunc, cached_njit

CODES, SCALES, OFFSETS, X, OUT, SCRATCH, ROWS, INPUTS, GROUPS, TOKENS, THREADS, FIRST = range(12)
KERNEL, THREAD_NUM, NUM_THREADS, OWN, PLACES = range(12, 17)
"""Places of the numbers that a kernel is told: addresses, then sizes. OFFSETS is 0 for a symmetric scheme, and FIRST is
the first row of a tile. The last ones are for `member`."""
INT8, INT4, FP8, INT8_PAIRS, FP8_PAIRS = range(5)
"""Kinds of codes. Pairs are in groups of 16, two of which count as one group with two scales."""
_PAIRED = (INT8_PAIRS, FP8_PAIRS)
FLOAT8_SCALE = np.float32(2.0**120)
"""What the bits of a float8_e4m3fn, shifted to their places in a float32, must be multiplied by."""

_FAST = {"reassoc", "contract", "nsz", "arcp"}
_LANES = 16


def _pointer(kind: Any) -> Any:
    """Return an intrinsic: the pointer to numbers of a kind at an address."""

    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return pointer


float32_at, int32_at, int8_at = (_pointer(kind) for kind in (types.float32, types.int32, types.int8))
uint16_at, uint8_at = (_pointer(kind) for kind in (types.uint16, types.uint8))


@intrinsic
def _ask(typingctx: Any, address: Any) -> Any:
    """Call the C function ``int()`` at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.call(builder.inttoptr(args[0], function), [])

    return types.int32(types.int64), codegen


@intrinsic
def _call(typingctx: Any, address: Any, told: Any, thread: Any) -> Any:
    """Call the C function at an address with two numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [word, word]).as_pointer()
        builder.call(builder.inttoptr(args[0], function), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _decode(kind: int, *, narrow: bool) -> Any:
    """Return an intrinsic that writes a row of the weight, as float32 or, if `narrow`, as bfloat16.

    Its arguments are the addresses of codes, scales, offsets (0 for none) and outputs, the number of groups, and half a
    group's size.
    """

    @intrinsic
    def decode(typingctx: Any, codes: Any, scales: Any, offsets: Any, out: Any, groups: Any, half: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _DotCode(builder, kind).decode(*args, narrow=narrow)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return decode


def _dot(kind: int) -> Any:
    """Return an intrinsic: the dot product of a row's codes with float32 inputs, group by group.

    Its arguments are the addresses of codes, scales and inputs, the number of groups, and half a group's size. Codes of
    four bits count as 0 to 15, and the inputs of a group's second half must be divided by 16.
    """

    @intrinsic
    def dot(typingctx: Any, codes: Any, scales: Any, x: Any, groups: Any, half: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _DotCode(builder, kind).write(*args)

        return types.float32(*[types.int64] * 5), codegen

    return dot


class _DotCode:
    """Writer of the instructions of one dot product."""

    def __init__(self, builder: Any, kind: int) -> None:
        self.builder, self.kind = builder, kind
        self.word, self.float = ir.IntType(64), ir.FloatType()
        self.vector = ir.VectorType(self.float, _LANES)
        self.whole = ir.VectorType(ir.IntType(32), _LANES)

    def write(self, codes: Any, scales: Any, x: Any, groups: Any, half: Any) -> Any:
        b, zero = self.builder, ir.Constant(self.word, 0)
        entry, outer = b.block, b.append_basic_block("group")
        inner, after, done = (b.append_basic_block(name) for name in ("codes", "scale", "sum"))
        b.branch(outer)
        b.position_at_end(outer)
        group, total = b.phi(self.word), b.phi(self.vector)
        group.add_incoming(zero, entry)
        total.add_incoming(ir.Constant(self.vector, [0.0] * _LANES), entry)
        size = b.mul(half, ir.Constant(self.word, 2))
        x_at = b.add(x, b.mul(b.mul(group, size), ir.Constant(self.word, 4)))
        codes_at = b.add(codes, b.mul(group, half if self.kind == INT4 else size))
        b.branch(inner)
        b.position_at_end(inner)
        place, *parts = b.phi(self.word), b.phi(self.vector), b.phi(self.vector)
        place.add_incoming(zero, outer)
        for part in parts:
            part.add_incoming(ir.Constant(self.vector, [0.0] * _LANES), outer)
        weights = self._raw(codes_at, place) if self.kind == INT4 else self._weights(codes_at, place, half)
        sums = [
            self._fma(weight, self._load(self._float_at(x_at, b.add(place, first)), self.vector), part)
            for weight, part, first in zip(weights, parts, (zero, half), strict=True)
        ]
        following = b.add(place, ir.Constant(self.word, _LANES))
        place.add_incoming(following, inner)
        for part, found in zip(parts, sums, strict=True):
            part.add_incoming(found, inner)
        b.cbranch(b.icmp_signed("<", following, half), inner, after)
        b.position_at_end(after)
        if self.kind in _PAIRED:
            scaled = total
            for part, scale in zip(sums, self._pair(scales, group), strict=True):
                scaled = self._fma(part, scale, scaled)
        else:
            scale = b.load(b.inttoptr(self._float_at(scales, group), self.float.as_pointer()))
            scaled = self._fma(b.fadd(*sums), self._splat(scale), total)
        next_group = b.add(group, ir.Constant(self.word, 1))
        group.add_incoming(next_group, after)
        total.add_incoming(scaled, after)
        b.cbranch(b.icmp_signed("<", next_group, groups), outer, done)
        b.position_at_end(done)
        return self._reduce(scaled)

    def decode(self, codes: Any, scales: Any, offsets: Any, out: Any, groups: Any, half: Any, *, narrow: bool) -> None:
        b, zero, size = self.builder, ir.Constant(self.word, 0), 2 if narrow else 4
        entry, outer = b.block, b.append_basic_block("group")
        inner, after, done = (b.append_basic_block(name) for name in ("codes", "next", "done"))
        b.branch(outer)
        b.position_at_end(outer)
        group = b.phi(self.word)
        group.add_incoming(zero, entry)
        whole = b.mul(half, ir.Constant(self.word, 2))
        out_at = b.add(out, b.mul(b.mul(group, whole), ir.Constant(self.word, size)))
        codes_at = b.add(codes, b.mul(group, half if self.kind == INT4 else whole))
        there = b.icmp_signed("!=", offsets, zero)
        pairs = self._pair(scales, group), self._pair(b.select(there, offsets, scales), group)
        nothing = ir.Constant(self.vector, [0.0] * _LANES)
        scale, offset = pairs[0], [b.select(there, one, nothing) for one in pairs[1]]
        b.branch(inner)
        b.position_at_end(inner)
        place = b.phi(self.word)
        place.add_incoming(zero, outer)
        for number, (weight, first) in enumerate(zip(self._weights(codes_at, place, half), (zero, half), strict=True)):
            at = b.add(out_at, b.mul(b.add(place, first), ir.Constant(self.word, size)))
            self._store(self._fma(weight, scale[number], offset[number]), at, narrow=narrow)
        following = b.add(place, ir.Constant(self.word, _LANES))
        place.add_incoming(following, inner)
        b.cbranch(b.icmp_signed("<", following, half), inner, after)
        b.position_at_end(after)
        next_group = b.add(group, ir.Constant(self.word, 1))
        group.add_incoming(next_group, after)
        b.cbranch(b.icmp_signed("<", next_group, groups), outer, done)
        b.position_at_end(done)

    def _store(self, value: Any, address: Any, *, narrow: bool) -> None:
        b = self.builder
        if narrow:  # to nearest, ties to even
            bits = b.bitcast(value, self.whole)
            odd = b.and_(b.lshr(bits, self._all(16)), self._all(1))
            rounded = b.lshr(b.add(bits, b.add(odd, self._all(0x7FFF))), self._all(16))
            value = b.trunc(rounded, ir.VectorType(ir.IntType(16), _LANES))
        b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)

    def _weights(self, codes: Any, place: Any, half: Any) -> list[Any]:
        """Return the codes at a place of the first and of the second half of a group, as float32."""
        b, small = self.builder, ir.VectorType(ir.IntType(8), _LANES)
        first = self._load(b.add(codes, place), small)
        if self.kind == INT4:
            both = b.zext(first, self.whole)
            pair = (b.and_(both, self._all(15)), b.lshr(both, self._all(4)))
            return [b.sitofp(b.sub(one, self._all(8)), self.vector) for one in pair]
        pair = (first, self._load(b.add(codes, b.add(place, half)), small))
        if self.kind in (INT8, INT8_PAIRS):
            return [b.sitofp(b.sext(one, self.whole), self.vector) for one in pair]
        wide = [b.zext(one, self.whole) for one in pair]
        bits = [
            b.or_(b.shl(b.and_(one, self._all(128)), self._all(24)), b.shl(b.and_(one, self._all(127)), self._all(20)))
            for one in wide
        ]
        scale = ir.Constant(self.vector, [float(FLOAT8_SCALE)] * _LANES)
        return [b.fmul(b.bitcast(one, self.vector), scale) for one in bits]

    def _pair(self, scales: Any, group: Any) -> list[Any]:
        """Return the scales of the first and of the second half of a group."""
        b, two = self.builder, ir.Constant(self.word, 2)
        if self.kind not in _PAIRED:
            return [self._splat(b.load(b.inttoptr(self._float_at(scales, group), self.float.as_pointer())))] * 2
        places = (b.add(b.mul(group, two), ir.Constant(self.word, number)) for number in (0, 1))
        return [self._splat(b.load(b.inttoptr(self._float_at(scales, at), self.float.as_pointer()))) for at in places]

    def _raw(self, codes: Any, place: Any) -> list[Any]:
        """Return codes of four bits plus 8, as float32, those of the second half times 16."""
        b = self.builder
        both = b.zext(self._load(b.add(codes, place), ir.VectorType(ir.IntType(8), _LANES)), self.whole)
        return [b.sitofp(b.and_(both, self._all(mask)), self.vector) for mask in (15, 240)]

    def _float_at(self, address: Any, index: Any) -> Any:
        return self.builder.add(address, self.builder.mul(index, ir.Constant(self.word, 4)))

    def _load(self, address: Any, kind: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def _all(self, value: int) -> Any:
        return ir.Constant(self.whole, [value] * _LANES)

    def _splat(self, value: Any) -> Any:
        one = self.builder.insert_element(ir.Constant(self.vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(one, one, ir.Constant(self.whole, [0] * _LANES))

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        product = self.builder.fmul(a, b, flags=("contract",))
        return self.builder.fadd(product, c, flags=("contract",))

    def _reduce(self, vector: Any) -> Any:
        size = _LANES
        while size > 1:
            size //= 2
            places = [*range(size, 2 * size), *range(_LANES - size)][:_LANES]
            moved = self.builder.shuffle_vector(vector, vector, ir.Constant(self.whole, places))
            vector = self.builder.fadd(vector, moved)
        return self.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


_DOTS = {kind: _dot(kind) for kind in (INT8, INT4, FP8, *_PAIRED)}
_DECODES = {(kind, narrow): _decode(kind, narrow=narrow) for kind in _DOTS for narrow in (False, True)}


@njit(inline="always")
def _whole(code):  # type: ignore[no-untyped-def]
    return np.float32(code)


@njit(inline="always")
def _float8(code):  # type: ignore[no-untyped-def]
    bits = (np.uint32(code & np.uint8(128)) << np.uint32(24)) | (np.uint32(code & np.uint8(127)) << np.uint32(20))
    return np.uint32(bits).view(np.float32) * FLOAT8_SCALE


@njit(inline="always")
def _share(told, thread):  # type: ignore[no-untyped-def]
    rows, threads = told[ROWS], told[THREADS]
    return thread * rows // threads, (thread + 1) * rows // threads


def _one_token(kind: int, dot: Any) -> Any:
    below = np.float32(8 if kind == INT4 else 0)  # what codes of four bits are read too high
    second = np.float32(16 if kind == INT4 else 1)  # what inputs of a second half are divided by
    each = 2 if kind in _PAIRED else 1  # scales of a group

    def one_token(told_at, thread):  # type: ignore[no-untyped-def]
        told = carray(told_at, (PLACES,))
        rows, inputs, groups = told[ROWS], told[INPUTS], told[GROUPS]
        size, width = inputs // groups, inputs // 2 if kind == INT4 else inputs
        half, has_offsets = size // 2, told[OFFSETS] != 0
        out = carray(float32_at(told[OUT]), (rows,))
        scales = carray(float32_at(told[SCALES]), (rows, groups * each))
        offsets = carray(float32_at(told[OFFSETS]), (rows, groups * each))
        x = carray(float32_at(told[X]), (groups, 2, half))
        sums = carray(float32_at(told[SCRATCH] + thread * inputs * 4), (groups * each,))
        if has_offsets or kind == INT4:
            for group in range(groups):
                one, other = np.float32(0), np.float32(0)
                for i in range(half):
                    one += x[group, 0, i]
                    other += x[group, 1, i]
                if each == 2:
                    sums[2 * group], sums[2 * group + 1] = one, other
                else:
                    sums[group] = one + other * second
        first, last = _share(told, thread)
        for row in range(first, last):
            found = dot(told[CODES] + row * width, told[SCALES] + row * groups * each * 4, told[X], groups, half)
            if kind == INT4:
                low = np.float32(0)
                for group in range(groups):
                    low += scales[row, group] * sums[group]
                found -= low * below
            if has_offsets:
                for group in range(groups * each):
                    found += offsets[row, group] * sums[group]
            out[row] = found

    return one_token


def _one_scale(kind: int) -> Any:
    """Return the product of one token with codes of eight bits that have one scale for each output.

    The compiler makes a better loop of it than of groups.
    """
    read, widen = (uint8_at, _float8) if kind == FP8 else (int8_at, _whole)

    def one_scale(told_at, thread):  # type: ignore[no-untyped-def]
        told = carray(told_at, (PLACES,))
        rows, inputs = told[ROWS], told[INPUTS]
        codes = carray(read(told[CODES]), (rows, inputs))
        scales, out = carray(float32_at(told[SCALES]), (rows,)), carray(float32_at(told[OUT]), (rows,))
        x = carray(float32_at(told[X]), (inputs,))
        first, last = _share(told, thread)
        for row in range(first, last):
            total = np.float32(0)
            for i in range(inputs):
                total += widen(codes[row, i]) * x[i]
            out[row] = total * scales[row]

    return one_scale


def _few_tokens(kind: int, decode: Any) -> Any:
    scale_bytes = 8 if kind in _PAIRED else 4  # of a group

    def few_tokens(told_at, thread):  # type: ignore[no-untyped-def]
        told = carray(told_at, (PLACES,))
        rows, inputs, groups, tokens = told[ROWS], told[INPUTS], told[GROUPS], told[TOKENS]
        width = inputs // 2 if kind == INT4 else inputs
        x = carray(float32_at(told[X]), (tokens, inputs))
        out = carray(float32_at(told[OUT]), (tokens, rows))
        at = told[SCRATCH] + thread * inputs * 4
        scratch = carray(float32_at(at), (inputs,))
        first, last = _share(told, thread)
        for row in range(first, last):
            offsets = told[OFFSETS] + row * groups * scale_bytes if told[OFFSETS] != 0 else 0
            decode(
                told[CODES] + row * width,
                told[SCALES] + row * groups * scale_bytes,
                offsets,
                at,
                groups,
                inputs // groups // 2,
            )
            for start in range(0, tokens - 3, 4):
                a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for i in range(inputs):
                    weight = scratch[i]
                    a += weight * x[start, i]
                    b += weight * x[start + 1, i]
                    c += weight * x[start + 2, i]
                    d += weight * x[start + 3, i]
                out[start, row], out[start + 1, row], out[start + 2, row], out[start + 3, row] = a, b, c, d
            for token in range(tokens - tokens % 4, tokens):
                total = np.float32(0)
                for i in range(inputs):
                    total += scratch[i] * x[token, i]
                out[token, row] = total

    return few_tokens


def _tile(kind: int, decode: Any, size: int) -> Any:
    scale_bytes = 8 if kind in _PAIRED else 4  # of a group

    def tile(told_at, thread):  # type: ignore[no-untyped-def]
        told = carray(told_at, (PLACES,))
        inputs, groups = told[INPUTS], told[GROUPS]
        width = inputs // 2 if kind == INT4 else inputs
        first, last = _share(told, thread)
        for place in range(first, last):
            row = told[FIRST] + place
            offsets = told[OFFSETS] + row * groups * scale_bytes if told[OFFSETS] != 0 else 0
            decode(
                told[CODES] + row * width,
                told[SCALES] + row * groups * scale_bytes,
                offsets,
                told[OUT] + place * inputs * size,
                groups,
                inputs // groups // 2,
            )

    return tile


_SIGNATURE = types.void(types.CPointer(types.int64), types.int64)


@cache
def one_token(kind: int) -> Any:
    """Return the C function for a product of one token."""
    return cached_cfunc(_SIGNATURE, _one_token(kind, _DOTS[kind]), fastmath=_FAST)


@cache
def one_scale(kind: int) -> Any:
    """Return the C function for a product of one token with codes of eight bits, and one scale for each output."""
    return cached_cfunc(_SIGNATURE, _one_scale(kind), fastmath=_FAST)


@cache
def few_tokens(kind: int) -> Any:
    """Return the C function for a product of a few tokens, with a scratch row [inputs] float32 for each thread."""
    return cached_cfunc(_SIGNATURE, _few_tokens(kind, _DECODES[kind, False]), fastmath=_FAST)


@cache
def tile(kind: int) -> Any:
    """Return the C function that dequantizes ROWS rows from FIRST on into OUT [rows, inputs] float32."""
    return cached_cfunc(_SIGNATURE, _tile(kind, _DECODES[kind, False], 4), fastmath=_FAST)


@cache
def narrow_tile(kind: int) -> Any:
    """Return the same for bfloat16."""
    return cached_cfunc(_SIGNATURE, _tile(kind, _DECODES[kind, True], 2), fastmath=_FAST)


def _member(told_at):  # type: ignore[no-untyped-def]
    told = carray(told_at, (PLACES,))
    first, step = np.int64(_ask(told[THREAD_NUM])), np.int64(_ask(told[NUM_THREADS]))
    for thread in range(first, told[THREADS], step):
        _call(told[KERNEL], told[OWN], thread)


@cache
def member() -> Any:
    """Return the C function that a thread of a team runs: its shares of KERNEL, told by the array at OWN.

    THREAD_NUM and NUM_THREADS are addresses of OpenMP's functions.
    """
    return cached_cfunc(types.void(types.CPointer(types.int64)), _member, fastmath=_FAST)


@cached_njit(nogil=True, parallel=True, no_cfunc_wrapper=True)
def on_threads(address: Any, told: Any, threads: Any) -> None:
    """Call the C function at an address for each thread."""
    for thread in prange(threads):
        _call(address, told.ctypes.data, np.int64(thread))
