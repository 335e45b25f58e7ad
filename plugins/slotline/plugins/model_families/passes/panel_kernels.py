"""Products of one to sixteen rows with a weight in oneDNN's blocked layout on a CPU, compiled by numba.

oneDNN's own products serve many rows; for few they read the weight at a third of the memory's rate. The layout is a row
of panels of 64 outputs. A panel holds its 64 weights of one input after the other (float32), or of one pair of inputs
after the other (bfloat16), so a kernel reads it once, in order, and sums 64 outputs of up to six rows in registers.
`has_panels` compares the layout with what is told here, since it is oneDNN's own affair.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from slotline.kernels.exponential import exp
from slotline.kernels.numba_cache import cached_cfunc
from slotline.plugins.model_families.passes.dense_kernels import (
    BIAS,
    CALL,
    FAST,
    INPUTS,
    MODE,
    NUM_THREADS,
    OTHER,
    OUT,
    OUTPUTS,
    PLACES,
    ROWS,
    SIGNATURE,
    THREAD_NUM,
    WEIGHT,
    X,
    add_products,
    adds_pairs,
    ask,
    element_pointer,
    rounded_bits,
    run_product,
    widened,
)
from slotline.plugins.model_families.passes.few_rows import ADD, LANES, MULTIPLY, NOTHING, SWISH

WIDTH = 64
"""Outputs of a panel."""
STEP_BYTES = 256
"""Bytes of a panel that belong to one input in float32, or to two in bfloat16."""
PADDED_STEPS = 16
"""A panel has zeros up to a multiple of so many steps."""
MOST_AT_ONCE = 6
"""Rows whose sums fit into the registers of AVX-512: four vectors each, beside four of weights."""
PROBE = (130, 42)
"""Outputs and inputs of the weight whose layout is compared."""


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [outputs, inputs] as panels, flat: what oneDNN's layout must be."""
    outputs, inputs = weight.shape
    count, step = -(-outputs // WIDTH), 1 if weight.dtype == torch.float32 else 2
    padded = weight.new_zeros((count * WIDTH, -(-inputs // (step * PADDED_STEPS)) * step * PADDED_STEPS))
    padded[:outputs, :inputs] = weight
    return padded.view(count, WIDTH, -1, step).transpose(1, 2).flatten()


@cache
def has_panels(dtype: torch.dtype) -> bool:
    """Return True if oneDNN's layout of this dtype is the one that is told here, and its memory can be read."""
    weight = torch.arange(PROBE[0] * PROBE[1]).remainder(251).view(PROBE).to(dtype)  # exact in bfloat16
    expected = panels_of(weight)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        size, address = int(torch.ops.mkldnn._nbytes(packed)), int(torch.ops.mkldnn.data_ptr(packed))
    except (AttributeError, RuntimeError):
        return False  # a torch that does not show it
    return size == expected.nbytes and ctypes.string_at(address, size) == ctypes.string_at(expected.data_ptr(), size)


def _sums(rows: int, *, narrow: bool, paired: bool) -> Any:
    """Return an intrinsic that writes the products of `rows` inputs with one panel, [rows, 64] float32.

    Its arguments are addresses of the inputs, float32, or bfloat16 if `paired`, of the panel, and of the results; then
    the number of inputs, and of steps through the panel.
    """
    word, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
    whole = ir.VectorType(ir.IntType(32), LANES)
    vectors = WIDTH // LANES
    zero = ir.Constant(vector, [0.0] * LANES)
    shift, high = ir.Constant(whole, [16] * LANES), ir.Constant(whole, [0xFFFF0000] * LANES)
    x_size, a_step = (2, 2) if paired else (4, 2 if narrow else 1)

    def at(b: Any, base: Any, offset: Any, kind: Any, align: int) -> Any:
        return b.load(b.inttoptr(b.add(base, offset), kind.as_pointer()), align=align)

    def splat(b: Any, value: Any, kind: Any) -> Any:
        first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(whole, [0] * LANES))

    def write(b: Any, x: Any, panel: Any, out: Any, inputs: Any, steps: Any) -> None:
        sums = [[cgutils.alloca_once(b, vector) for _ in range(vectors)] for _ in range(rows)]
        for places in sums:
            for place in places:
                b.store(zero, place)
        starts = [b.add(x, b.mul(inputs, ir.Constant(word, row * x_size))) for row in range(rows)]
        with cgutils.for_range(b, steps) as loop:
            begin = b.mul(loop.index, ir.Constant(word, STEP_BYTES))
            places = [b.add(begin, ir.Constant(word, STEP_BYTES // vectors * v)) for v in range(vectors)]
            taken = b.mul(loop.index, ir.Constant(word, x_size * a_step))
            if narrow:
                words = [at(b, panel, place, whole, 2) for place in places]
                weights = words if paired else [b.bitcast(b.shl(w, shift), vector) for w in words]
                second = [] if paired else [b.bitcast(b.and_(w, high), vector) for w in words]
            else:
                weights, second = [at(b, panel, place, vector, 4) for place in places], []
            for row in range(rows):
                if paired:
                    given = splat(b, at(b, starts[row], taken, ir.IntType(32), 2), whole)
                else:
                    given = splat(b, at(b, starts[row], taken, ir.FloatType(), 4), vector)
                for v in range(vectors):
                    b.store(add_products(b, b.load(sums[row][v]), weights[v], given, paired=paired), sums[row][v])
                if second:
                    later = b.add(taken, ir.Constant(word, 4))
                    given = splat(b, at(b, starts[row], later, ir.FloatType(), 4), vector)
                    for v in range(vectors):
                        b.store(add_products(b, b.load(sums[row][v]), second[v], given, paired=paired), sums[row][v])
        for row in range(rows):
            for v in range(vectors):
                place = b.add(out, ir.Constant(word, 4 * (row * WIDTH + v * LANES)))
                b.store(b.load(sums[row][v]), b.inttoptr(place, vector.as_pointer()), align=4)

    @intrinsic
    def sums(typingctx, x, panel, out, inputs, steps):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            write(builder, *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return sums


@cache
def compile_product(*, narrow: bool, paired: bool) -> Any:
    """Compile the C function of an array of `PLACES` numbers that one thread of a team runs.

    WEIGHT are panels. BIAS [OUTPUTS], OTHER and OUT [ROWS, OUTPUTS] are bfloat16 if `narrow`, else float32. X [ROWS,
    INPUTS] is float32, or bfloat16 if `paired`. Rows are independent: their sums have one order, whatever their number.
    """
    tag = np.empty(0, np.uint16 if narrow else np.float32)
    six, four, two, one = (_sums(rows, narrow=narrow, paired=paired) for rows in (6, 4, 2, 1))
    x_size, per_step = 2 if paired else 4, 2 if narrow else 1
    stored = rounded_bits if narrow else widened

    def product(told_at):  # type: ignore[no-untyped-def]
        told, unbounded = carray(told_at, (PLACES,)), 1 << 60
        rows, inputs, outputs, mode = told[ROWS], told[INPUTS], told[OUTPUTS], told[MODE]
        thread, threads = 0, 1
        if told[THREAD_NUM] != 0:
            thread, threads = ask(told[THREAD_NUM]), ask(told[NUM_THREADS])
        panels, steps = (outputs + WIDTH - 1) // WIDTH, inputs // per_step
        panel_bytes = (steps + PADDED_STEPS - 1) // PADDED_STEPS * PADDED_STEPS * STEP_BYTES
        out = carray(element_pointer(told[OUT], tag), unbounded)
        bias = carray(element_pointer(told[BIAS], tag), unbounded)
        other = carray(element_pointer(told[OTHER], tag), unbounded)
        scratch = np.empty(MOST_AT_ONCE * WIDTH, np.float32)
        to = scratch.ctypes.data
        for panel in range(thread * panels // threads, (thread + 1) * panels // threads):
            column = panel * WIDTH
            held = min(outputs - column, WIDTH)
            weight, row = told[WEIGHT] + panel * panel_bytes, 0
            while row < rows:
                x = told[X] + row * inputs * x_size
                if rows - row >= 6:
                    six(x, weight, to, inputs, steps)
                    count = 6
                elif rows - row >= 4:
                    four(x, weight, to, inputs, steps)
                    count = 4
                elif rows - row >= 2:
                    two(x, weight, to, inputs, steps)
                    count = 2
                else:
                    one(x, weight, to, inputs, steps)
                    count = 1
                for i in range(count):
                    at = (row + i) * outputs + column
                    found, target = scratch[i * WIDTH : i * WIDTH + held], out[at : at + held]
                    if told[BIAS] != 0:
                        for k in range(held):
                            found[k] += widened(bias[column + k])
                    if mode == ADD:
                        for k in range(held):
                            found[k] += widened(other[at + k])
                    elif mode == MULTIPLY:
                        for k in range(held):
                            found[k] *= widened(other[at + k])
                    elif mode == SWISH:
                        for k in range(held):
                            small = exp(-abs(found[k]))
                            found[k] *= (np.float32(1.0) if found[k] >= 0 else small) / (np.float32(1.0) + small)
                    for k in range(held):
                        target[k] = stored(found[k])
                row += count

    return cached_cfunc(SIGNATURE, product, fastmath=FAST)


def few_rows(
    x: torch.Tensor,
    panels: int,
    outputs: int,
    bias: torch.Tensor | None,
    other: torch.Tensor | None = None,
    mode: int = NOTHING,
) -> torch.Tensor:
    """Multiply x [..., in_features] of at most `few_rows.MOST_ROWS` rows by a weight in oneDNN's layout.

    Args:
        panels: address of the weight, see `address_of`.
        other: [..., outputs], what `mode` adds or multiplies by.
    """
    dtype = x.dtype
    narrow = dtype == torch.bfloat16
    paired = narrow and adds_pairs()
    given = x if paired or not narrow else x.float()
    if not given.is_contiguous():
        given = given.contiguous()
    out = torch.empty((*x.shape[:-1], outputs), dtype=dtype)
    run_product(_kernel(narrow=narrow, paired=paired), given, panels, bias, other, out, mode)
    return out


def address_of(packed: torch.Tensor) -> int:
    """Return the address of a weight in oneDNN's layout, which stays while the tensor lives."""
    return int(torch.ops.mkldnn.data_ptr.default(packed))


@cache
def _kernel(*, narrow: bool, paired: bool) -> tuple[int, Any]:
    address = compile_product(narrow=narrow, paired=paired).address
    return address, CALL(address)
