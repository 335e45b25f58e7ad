"""Products of one to sixteen rows with a plain weight on a CPU, compiled by numba: the weight is read once, as it lies.

Four outputs and up to four rows are summed in registers at once, in float32. Where the processor has them (AVX-512
BF16), products of bfloat16 are added in pairs, which takes half as many instructions and no conversion. The threads are
those of torch's pool.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import ctypes
from functools import cache
from struct import Struct
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from slotline.kernels.numba_cache import cached_cfunc
from slotline.kernels.torch_threads import torch_team
from slotline.plugins.model_families.passes.few_rows import ADD, LANES, MULTIPLY, NOTHING, SWISH

X, WEIGHT, BIAS, OTHER, OUT, ROWS, INPUTS, OUTPUTS, MODE, THREAD_NUM, NUM_THREADS, PLACES = range(12)
"""Places of what a call is told: addresses (0 for none), sizes, what to do last, and functions of OpenMP."""

FAST = {"reassoc", "contract", "nsz", "arcp"}
_FOUR = 4
SIGNATURE = types.void(types.CPointer(types.int64))
CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_TOLD = Struct(f"{PLACES}q")


@intrinsic
def element_pointer(typingctx: Any, address: Any, tag: Any) -> Any:
    """Return an address as a pointer to elements of `tag`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(tag.dtype)(types.int64, tag), codegen


@intrinsic
def ask(typingctx: Any, address: Any) -> Any:
    """Call the C function ``int()`` at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.zext(builder.call(builder.inttoptr(args[0], function), []), ir.IntType(64))

    return types.int64(types.int64), codegen


class Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat16)

    def __hash__(self) -> int:
        return hash(Bfloat16)


@cache
def adds_pairs() -> bool:
    """Return True if the processor adds products of pairs of bfloat16 (AVX-512 BF16), and numba compiles for it."""
    return "+avx512bf16" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


def add_products(b: Any, total: Any, weight: Any, given: Any, *, paired: bool) -> Any:
    """Return a vector of float32 sums with products added: of float32, or of bfloat16 in pairs if `paired`."""
    if not paired:
        return b.fadd(total, b.fmul(weight, given, flags=("contract",)), flags=("contract",))
    pairs, name = ir.VectorType(Bfloat16(), 2 * LANES), "llvm.x86.avx512bf16.dpbf16ps.512"
    kind = ir.FunctionType(total.type, [total.type, pairs, pairs])
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    return b.call(function, [total, b.bitcast(weight, pairs), b.bitcast(given, pairs)])


def _dots(rows: int, *, narrow: bool, paired: bool) -> Any:
    """Return an intrinsic that writes the dot products of `rows` inputs with four outputs' weights, [rows, 4].

    Its arguments are addresses of the inputs, float32, or bfloat16 if `paired`, of the first weight, and of the
    results; then the input features and the outputs that there are, of which the last stands for those that are
    missing.
    """
    lanes = 2 * LANES if paired else LANES
    word, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
    zero = ir.Constant(vector, [0.0] * LANES)
    shift = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [16] * LANES)

    def write(b: Any, x: Any, weight: Any, out: Any, inputs: Any, held: Any) -> None:
        size = ir.Constant(word, 2 if narrow else 4)
        last = b.sub(held, ir.Constant(word, 1))
        at = []
        for k in range(_FOUR):
            number = ir.Constant(word, k)
            number = b.select(b.icmp_signed("<", number, last), number, last)
            at.append(b.add(weight, b.mul(b.mul(number, inputs), size)))
        sums = [[cgutils.alloca_once(b, vector) for _ in range(_FOUR)] for _ in range(rows)]
        for places in sums:
            for place in places:
                b.store(zero, place)
        with cgutils.for_range(b, b.udiv(inputs, ir.Constant(word, lanes))) as loop:
            begin = b.mul(loop.index, ir.Constant(word, lanes))
            weights = [_load(b, b.add(one, b.mul(begin, size))) for one in at]
            for row in range(rows):
                place = b.add(begin, b.mul(inputs, ir.Constant(word, row)))
                place = b.inttoptr(b.add(x, b.mul(place, ir.Constant(word, 2 if paired else 4))), vector.as_pointer())
                given = b.load(place, align=2 if paired else 4)
                for k in range(_FOUR):
                    b.store(add_products(b, b.load(sums[row][k]), weights[k], given, paired=paired), sums[row][k])
        for row in range(rows):
            for k in range(_FOUR):
                place = b.add(out, ir.Constant(word, 4 * (row * _FOUR + k)))
                b.store(_across(b, b.load(sums[row][k])), b.inttoptr(place, ir.FloatType().as_pointer()), align=4)

    def _load(b: Any, address: Any) -> Any:
        if paired:
            return b.load(b.inttoptr(address, vector.as_pointer()), align=2)
        if not narrow:
            return b.load(b.inttoptr(address, vector.as_pointer()), align=4)
        short = ir.VectorType(ir.IntType(16), LANES)
        bits = b.load(b.inttoptr(address, short.as_pointer()), align=2)
        return b.bitcast(b.shl(b.zext(bits, shift.type), shift), vector)

    @intrinsic
    def dots(typingctx, x, weight, out, inputs, held):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            write(builder, *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return dots


def _across(b: Any, found: Any) -> Any:
    """Return the sum of a vector's elements, by halves."""
    width = LANES
    while width > 1:
        width //= 2
        places = [ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(at, at + width))) for at in (0, width)]
        found = b.fadd(*(b.shuffle_vector(found, found, place) for place in places))
    return b.extract_element(found, ir.Constant(ir.IntType(32), 0))


@intrinsic
def rounded_bits(typingctx: Any, value: Any) -> Any:
    """Return a float32 as a bfloat16's bits, rounded to nearest, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def widened(typingctx: Any, value: Any) -> Any:
    """Return a float32 as it is, or a bfloat16's bits as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), ir.Constant(word, 16)), ir.FloatType())

    return types.float32(value), codegen


@cache
def compile_product(*, narrow: bool, paired: bool) -> Any:
    """Compile the C function of an array of `PLACES` numbers that one thread of a team runs.

    The weight [OUTPUTS, INPUTS], BIAS [OUTPUTS], OTHER and OUT [ROWS, OUTPUTS] are bfloat16 if `narrow`, else float32.
    X [ROWS, INPUTS] is float32, or bfloat16 if `paired`. Rows are independent: their sums have one order, whatever
    their number.
    """
    tag = np.empty(0, np.uint16 if narrow else np.float32)
    size = 2 if narrow else 4
    four, two, one = (_dots(rows, narrow=narrow, paired=paired) for rows in (4, 2, 1))
    x_size = 2 if paired else 4
    stored = rounded_bits if narrow else widened

    def product(told_at):  # type: ignore[no-untyped-def]
        told, unbounded = carray(told_at, (PLACES,)), 1 << 60
        rows, inputs, outputs, mode = told[ROWS], told[INPUTS], told[OUTPUTS], told[MODE]
        thread, threads = 0, 1
        if told[THREAD_NUM] != 0:
            thread, threads = ask(told[THREAD_NUM]), ask(told[NUM_THREADS])
        blocks = (outputs + 3) // 4
        out = carray(element_pointer(told[OUT], tag), unbounded)
        bias, other = (
            carray(element_pointer(told[BIAS], tag), unbounded),
            carray(element_pointer(told[OTHER], tag), unbounded),
        )
        scratch = np.empty(16, np.float32)
        to = scratch.ctypes.data
        for block in range(thread * blocks // threads, (thread + 1) * blocks // threads):
            column = block * 4
            held = min(outputs - column, 4)
            weight, row = told[WEIGHT] + column * inputs * size, 0
            while row < rows:
                x = told[X] + row * inputs * x_size
                if rows - row >= 4:
                    four(x, weight, to, inputs, held)
                    count = 4
                elif rows - row >= 2:
                    two(x, weight, to, inputs, held)
                    count = 2
                else:
                    one(x, weight, to, inputs, held)
                    count = 1
                for i in range(count):
                    for k in range(held):
                        value, at = scratch[i * 4 + k], (row + i) * outputs + column + k
                        if told[BIAS] != 0:
                            value += widened(bias[column + k])
                        if mode == ADD:
                            value += widened(other[at])
                        elif mode == MULTIPLY:
                            value *= widened(other[at])
                        elif mode == SWISH:
                            value = value / (np.float32(1.0) + np.exp(-value))
                        out[at] = stored(value)
                row += count

    return cached_cfunc(SIGNATURE, product, fastmath=FAST)


def takes_pairs(inputs: int) -> bool:
    """Return True if the kernel of bfloat16 takes so many inputs as they are."""
    return inputs % (2 * LANES) == 0 and adds_pairs()


def runs() -> bool:
    """Return True if the kernel has torch's threads, or needs none."""
    return torch.get_num_threads() == 1 or torch_team() is not None


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    other: torch.Tensor | None = None,
    mode: int = NOTHING,
) -> torch.Tensor:
    """Multiply x [..., in_features] of at most `few_rows.MOST_ROWS` rows by a weight [out_features, in_features].

    Args:
        other: [..., out_features], what `mode` adds or multiplies by.
    """
    outputs, inputs = weight.shape
    narrow = weight.dtype == torch.bfloat16
    paired = narrow and x.dtype == torch.bfloat16 and takes_pairs(inputs)
    given = (x if paired else x.to(torch.float32)).contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    run_product(_kernel(narrow=narrow, paired=paired), given, weight.data_ptr(), bias, other, out, mode)
    return out


def run_product(
    kernel: tuple[int, Any],
    x: torch.Tensor,
    weight: int,
    bias: torch.Tensor | None,
    other: torch.Tensor | None,
    out: torch.Tensor,
    mode: int,
) -> None:
    """Run a compiled product in torch's threads.

    Args:
        kernel: its address, and how to call it.
        x: [..., in_features], contiguous, in the dtype that the kernel takes.
        weight: address of the weight.
        out: [..., out_features], contiguous.
    """
    if other is not None and not other.is_contiguous():
        other = other.contiguous()
    threads, inputs = torch.get_num_threads(), x.shape[-1]
    team = torch_team() if threads > 1 else None
    functions = (0, 0) if team is None else (team.thread_num, team.num_threads)
    told = _TOLD.pack(
        *(x.data_ptr(), weight, 0 if bias is None else bias.data_ptr()),
        *(0 if other is None else other.data_ptr(), out.data_ptr()),
        *(x.numel() // inputs, inputs, out.shape[-1], mode, *functions),
    )
    if team is None:
        kernel[1](told)
    else:
        team.run(kernel[0], told, threads)


@cache
def _kernel(*, narrow: bool, paired: bool) -> tuple[int, Any]:
    address = compile_product(narrow=narrow, paired=paired).address
    return address, CALL(address)
