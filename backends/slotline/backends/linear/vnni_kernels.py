"""Products of rounded activations with codes of eight and four bits on a CPU, by its dot product of bytes.

`vpdpbusd` (AVX-512 VNNI, AVX-VNNI) adds four products of an unsigned and a signed byte to each of 16 or 8 whole numbers
of 32 bits. The unsigned bytes are codes of 16 or 8 outputs, the signed ones inputs that are rounded to eight bits, with
a scale for each group of inputs. Sums of a group are exact. llama.cpp has the same arithmetic, and a
layout of this kind as "repacked": a vector holds codes of many outputs, so that no sum runs across it.

Packed codes [blocks, groups, steps, lanes, 4] are bytes: `LANES` outputs are a block, four inputs are a step. With four
bits a byte holds a code of an even step (low) and of the step after it. A code is stored plus 8 or plus 128, so that it
is not negative.

Functions are called by address with an array of numbers, see `CODES` and the constants after it, once for each thread.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from slotline.backends.linear.numba_kernels import PLACES as FIRST_FREE
from slotline.backends.linear.numba_kernels import THREADS, float32_at, int8_at, int32_at, uint8_at, uint16_at
from slotline.kernels.numba_cache import cached_cfunc

CODES, SCALES, OFFSETS, X, OUT, ROUNDED, STARTS, X_SCALES, X_SUMS, TAIL = range(THREADS)
ROWS = THREADS + 1
INPUTS, GROUPS, TOKENS, SCALE_STEP, LOW, PLACES = range(FIRST_FREE, FIRST_FREE + 6)
"""Places of the numbers that a kernel is told: addresses, then sizes. THREADS and those after ROWS are for `Workers`.

OFFSETS is 0 for a symmetric scheme. ROUNDED [tokens, inputs] int8, STARTS [tokens, groups] int32, X_SCALES and X_SUMS
[tokens, groups] float32 are what `round_inputs` writes. TAIL has room for `MOST` vectors in each thread. SCALE_STEP is
the distance of the scales of two groups in bytes, 0 if a row has one scale. LOW is what is added to a code.
"""
INT8, INT4, MXFP4 = range(3)
"""Kinds of codes. Those of MXFP4 are looked up, and stand for twice the number plus 12."""
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
_E2M1 = tuple(12 + sign * number for sign in (1, -1) for number in _TWICE)
MOST = 8
"""Most tokens that share a read of the codes."""
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_LOOKUPS = {16: "llvm.x86.avx512.pshuf.b.512", 8: "llvm.x86.avx2.pshuf.b"}
_INSTRUCTIONS = {16: "llvm.x86.avx512.vpdpbusd.512", 8: "llvm.x86.avx512.vpdpbusd.256"}


@cache
def lanes() -> int:
    """Return the outputs that one instruction works on: 16, 8, or 0 if the processor has no such instruction."""
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    if features.get("avx512vnni"):
        return 16
    return 8 if features.get("avxvnni") else 0


class _DotCode:
    """Writer of the instructions of the products of one block of outputs with a few tokens."""

    def __init__(self, builder: Any, width: int, kind: int, tokens: int, *, offsets: bool) -> None:
        self.builder, self.kind, self.tokens, self.offsets, self.width = builder, kind, tokens, offsets, width
        self.word, self.int32, self.float = ir.IntType(64), ir.IntType(32), ir.FloatType()
        self.whole, self.vector = ir.VectorType(self.int32, width), ir.VectorType(self.float, width)
        self.bytes = ir.VectorType(ir.IntType(8), 4 * width)
        self.multiply = self._instruction(_INSTRUCTIONS[width], self.whole, 3)

    def write(self, told: dict[str, Any], *, narrow: bool) -> None:
        """Write the loop over groups, and store the sums."""
        b, zero = self.builder, ir.Constant(self.word, 0)
        entry, outer = b.block, b.append_basic_block("group")
        inner, after, done = (b.append_basic_block(name) for name in ("steps", "scale", "store"))
        b.branch(outer)
        b.position_at_end(outer)
        group, totals = b.phi(self.word), [b.phi(self.vector) for _ in range(self.tokens)]
        group.add_incoming(zero, entry)
        for total in totals:
            total.add_incoming(ir.Constant(self.vector, [0.0] * self.width), entry)
        starts = [self._splat(self._at(told["starts"], self._place(told, t, group), self.int32)) for t in self._all()]
        first = b.mul(group, told["steps"])
        b.branch(inner)
        b.position_at_end(inner)
        step, parts = b.phi(self.word), [b.phi(self.whole) for _ in self._all()]
        step.add_incoming(zero, outer)
        for part, start in zip(parts, starts, strict=True):
            part.add_incoming(start, outer)
        sums = self._step(told, b.add(first, step), parts)
        following = b.add(step, ir.Constant(self.word, 1))
        step.add_incoming(following, inner)
        for part, found in zip(parts, sums, strict=True):
            part.add_incoming(found, inner)
        b.cbranch(b.icmp_signed("<", following, told["steps"]), inner, after)
        b.position_at_end(after)
        scaled = self._scale(told, group, sums, totals)
        next_group = b.add(group, ir.Constant(self.word, 1))
        group.add_incoming(next_group, after)
        for total, found in zip(totals, scaled, strict=True):
            total.add_incoming(found, after)
        b.cbranch(b.icmp_signed("<", next_group, told["groups"]), outer, done)
        b.position_at_end(done)
        for t, found in zip(self._all(), scaled, strict=True):
            self._store(found, b.add(told["out"], b.mul(told["out_step"], ir.Constant(self.word, t))), narrow=narrow)

    def _instruction(self, name: str, kind: Any, arguments: int) -> Any:
        module = self.builder.module
        return module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [kind] * arguments), name)

    def _numbers(self, codes: Any) -> Any:
        """Return what codes of four bits stand for."""
        if self.kind == INT4:
            return codes
        table = ir.Constant(self.bytes, [*_E2M1] * (self.width // 4))
        lookup = self._instruction(_LOOKUPS[self.width], self.bytes, 2)
        found = self.builder.call(lookup, [table, self.builder.bitcast(codes, self.bytes)])
        return self.builder.bitcast(found, self.whole)

    def _all(self) -> range:
        return range(self.tokens)

    def _place(self, told: dict[str, Any], token: int, group: Any) -> Any:
        """Return the index of a token's group in arrays [tokens, groups]."""
        return self.builder.add(group, self.builder.mul(told["groups"], ir.Constant(self.word, token)))

    def _step(self, told: dict[str, Any], step: Any, parts: list[Any]) -> list[Any]:
        """Return the sums after one vector of codes."""
        b = self.builder
        at = b.add(told["codes"], b.mul(step, ir.Constant(self.word, 4 * self.width)))
        read = b.load(b.inttoptr(at, self.whole.as_pointer()), align=4)
        if self.kind == INT8:
            codes = [read]
        else:
            mask, four = self._constant(0x0F0F0F0F), self._constant(4)
            codes = [self._numbers(b.and_(one, mask)) for one in (read, b.lshr(read, four))]
        for number, code in enumerate(codes):
            place = b.add(b.mul(step, ir.Constant(self.word, len(codes))), ir.Constant(self.word, number))
            for t in self._all():
                row = b.add(told["x"], b.mul(told["inputs"], ir.Constant(self.word, t)))
                parts = [*parts]
                parts[t] = b.call(self.multiply, [parts[t], code, self._splat(self._at(row, place, self.int32))])
        return parts

    def _scale(self, told: dict[str, Any], group: Any, sums: list[Any], totals: list[Any]) -> list[Any]:
        """Return the totals after a group."""
        b = self.builder
        at = b.mul(group, told["scale_step"])
        scales = b.load(b.inttoptr(b.add(told["scales"], at), self.vector.as_pointer()), align=4)
        found = []
        for t, (part, total) in enumerate(zip(sums, totals, strict=True)):
            of_x = self._splat(self._at(told["x_scales"], self._place(told, t, group), self.float))
            found.append(self._fma(b.sitofp(part, self.vector), b.fmul(scales, of_x), total))
        if self.offsets:
            offsets = b.load(b.inttoptr(b.add(told["offsets"], at), self.vector.as_pointer()), align=4)
            for t in self._all():
                x_sum = self._splat(self._at(told["x_sums"], self._place(told, t, group), self.float))
                found[t] = self._fma(offsets, x_sum, found[t])
        return found

    def _store(self, value: Any, address: Any, *, narrow: bool) -> None:
        b = self.builder
        if narrow:  # to nearest, ties to even
            bits = b.bitcast(value, self.whole)
            odd = b.and_(b.lshr(bits, self._constant(16)), self._constant(1))
            rounded = b.lshr(b.add(bits, b.add(odd, self._constant(0x7FFF))), self._constant(16))
            value = b.trunc(rounded, ir.VectorType(ir.IntType(16), self.width))
        b.store(value, b.inttoptr(address, value.type.as_pointer()), align=2)

    def _at(self, address: Any, index: Any, kind: Any) -> Any:
        """Return one number of four bytes."""
        b = self.builder
        return b.load(b.inttoptr(b.add(address, b.mul(index, ir.Constant(self.word, 4))), kind.as_pointer()), align=1)

    def _constant(self, value: int) -> Any:
        return ir.Constant(self.whole, [value] * self.width)

    def _splat(self, value: Any) -> Any:
        kind = ir.VectorType(value.type, self.width)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(self.int32, 0))
        return self.builder.shuffle_vector(one, one, ir.Constant(self.whole, [0] * self.width))

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


_NUMBERS = (
    *("codes", "scales", "offsets", "x", "starts", "x_scales", "x_sums", "out"),
    *("out_step", "inputs", "groups", "steps", "scale_step"),
)
"""Numbers that an intrinsic of `_dot` takes."""


@cache
def _dot(width: int, kind: int, tokens: int, *, offsets: bool, narrow: bool) -> Any:
    """Return an intrinsic that takes the numbers of `_NUMBERS` and writes `tokens` vectors of outputs."""

    @intrinsic
    def dot(typingctx, a, b, c, d, e, f, g, h, i, j, k, l, m):  # type: ignore[no-untyped-def]  # noqa: E741
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            told = dict(zip(_NUMBERS, args, strict=True))
            _DotCode(builder, width, kind, tokens, offsets=offsets).write(told, narrow=narrow)
            return context.get_dummy_value()

        return types.void(*[types.int64] * len(_NUMBERS)), codegen

    return dot


def _product(width: int, kind: int, *, offsets: bool, narrow: bool) -> Any:
    eight, four, two, one = (_dot(width, kind, n, offsets=offsets, narrow=narrow) for n in (8, 4, 2, 1))
    size = 2 if narrow else 4  # bytes of an output
    each = 1 if kind == INT8 else 2  # codes of a byte

    def product(told_at, thread):  # type: ignore[no-untyped-def]
        told = carray(told_at, (PLACES,))
        rows, inputs, groups, tokens = told[ROWS], told[INPUTS], told[GROUPS], told[TOKENS]
        blocks = (rows + width - 1) // width
        steps = inputs // groups // 4 // each
        scale_bytes = max(told[SCALE_STEP] * groups, width * 4)
        tail = told[TAIL] + thread * MOST * width * size
        first, last = thread * blocks // told[THREADS], (thread + 1) * blocks // told[THREADS]
        for block in range(first, last):
            codes = told[CODES] + block * (inputs // each) * width
            scales, added = told[SCALES] + block * scale_bytes, told[OFFSETS] + block * scale_bytes
            left = min(rows - block * width, width)
            token = 0
            while token < tokens:
                count = min(tokens - token, MOST)
                x, at = told[ROUNDED] + token * inputs, token * groups * 4
                starts, x_scales, x_sums = told[STARTS] + at, told[X_SCALES] + at, told[X_SUMS] + at
                out, out_step = told[OUT] + (token * rows + block * width) * size, rows * size
                to, to_step = (out, out_step) if left == width else (tail, width * size)
                step = told[SCALE_STEP]
                if count == 8:
                    eight(codes, scales, added, x, starts, x_scales, x_sums, to, to_step, inputs, groups, steps, step)
                elif count >= 4:
                    count = 4
                    four(codes, scales, added, x, starts, x_scales, x_sums, to, to_step, inputs, groups, steps, step)
                elif count >= 2:
                    count = 2
                    two(codes, scales, added, x, starts, x_scales, x_sums, to, to_step, inputs, groups, steps, step)
                else:
                    one(codes, scales, added, x, starts, x_scales, x_sums, to, to_step, inputs, groups, steps, step)
                if left < width:
                    for row in range(count):
                        source = carray(uint8_at(to + row * to_step), (left * size,))
                        target = carray(uint8_at(out + row * out_step), (left * size,))
                        for place in range(left * size):
                            target[place] = source[place]
                token += count

    return product


@njit(inline="always")
def _same(value):  # type: ignore[no-untyped-def]
    return value


@njit(inline="always")
def _wide(bits):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def _round_inputs(*, narrow: bool) -> Any:
    read, widen = (uint16_at, _wide) if narrow else (float32_at, _same)

    def round_inputs(told_at, thread):  # type: ignore[no-untyped-def]
        told = carray(told_at, (PLACES,))
        inputs, groups, tokens = told[INPUTS], told[GROUPS], told[TOKENS]
        length = inputs // groups
        x = carray(read(told[X]), (tokens, groups, length))
        rounded = carray(int8_at(told[ROUNDED]), (tokens, groups, length))
        starts = carray(int32_at(told[STARTS]), (tokens, groups))
        scales, sums = (
            carray(float32_at(told[X_SCALES]), (tokens, groups)),
            carray(float32_at(told[X_SUMS]), (tokens, groups)),
        )
        low = np.int32(told[LOW])
        for token in range(thread * tokens // told[THREADS], (thread + 1) * tokens // told[THREADS]):
            for group in range(groups):
                high, check = np.float32(0), np.float32(0)
                for i in range(length):
                    value = abs(widen(x[token, group, i]))
                    high = max(high, value)
                    check += value * np.float32(0)  # not a number if a value is infinite or none
                factor = np.float32(127) / high if high > np.float32(0) and check == np.float32(0) else np.float32(0)
                total = np.int32(0)
                for i in range(length):
                    code = np.int32(np.rint(widen(x[token, group, i]) * factor)) if factor > 0 else np.int32(0)
                    rounded[token, group, i] = code
                    total += code
                scale = high / np.float32(127) + check
                scales[token, group], sums[token, group] = scale, scale * np.float32(total)
                starts[token, group] = -low * total

    return round_inputs


_SIGNATURE = types.void(types.CPointer(types.int64), types.int64)


@cache
def product(width: int, kind: int, *, offsets: bool, narrow: bool) -> Any:
    """Return the C function for products, whose outputs are bfloat16 if `narrow`, else float32."""
    return cached_cfunc(_SIGNATURE, _product(width, kind, offsets=offsets, narrow=narrow), fastmath=_FAST)


@cache
def round_inputs(*, narrow: bool) -> Any:
    """Return the C function that rounds inputs, which are bfloat16 if `narrow`, else float32."""
    return cached_cfunc(_SIGNATURE, _round_inputs(narrow=narrow), fastmath=_FAST)
