"""Products of some tens of rows under large weights, on Hopper in Gluon: one warp loads while two warp groups compute.

Between few rows, which our products in Triton's own language serve (`product_kernels`), and many, torch's library takes
a third more time than fetching the weight does. Here the loading warp asks for its first tiles of the weight, as many
as shared memory holds, while the kernel in front still runs: weights are the one input that no kernel writes. Each of a
product's programs has a multiprocessor, and gate and up are activated where they are made.

The weight is the left operand, so that rows of x, of which there are few, are the columns of a product.
"""

# mypy: ignore-errors

from __future__ import annotations

from functools import partial

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slotline.core.gluon_names import load_box, thread_barrier
from slotline.core.launching import Boxes, Launcher
from slotline.plugins.model_families.passes.products import FEWEST_ELEMENTS
from slotline.plugins.model_families.passes.triton_kernels import activated

FEWEST_ROWS, MOST_ROWS = 33, 128
"""Rows that it has been measured to be faster for, with a weight of at least `LARGE_WEIGHT` elements."""
LARGE_WEIGHT = 1 << 25
OUTPUTS, ELEMENTS = 128, 64
"""Of a program: 64 outputs for each warp group, and of a tile's rows."""
STAGES = {(64, True): 5, (128, True): 4, (64, False): 8, (128, False): 6}
"""Tiles in shared memory, by rows of x in a tile and whether there are gate and up."""
FILLED = 0.8
"""The share of multiprocessors that must have a program."""


@gluon.jit
def _ask(boxes, places, full, stage, output, column, n, gated: gl.constexpr):
    """For a tile of the weight: 64 outputs for each warp group, and as many of up where it is gated."""
    for half in gl.static_range(2):
        at = output + half * 64
        if gated:
            load_box(boxes, [at, column], full.index(stage), places.index(stage * 4 + half * 2))
            load_box(boxes, [n + at, column], full.index(stage), places.index(stage * 4 + half * 2 + 1))
        else:
            load_box(boxes, [at, column], full.index(stage), places.index(stage * 2 + half))


@gluon.jit
def _load(
    x_boxes,
    weight_boxes,
    values,
    weights,
    full,
    empty,
    n,
    steps,
    block: gl.constexpr,
    outputs: gl.constexpr,
    elements: gl.constexpr,
    stages: gl.constexpr,
    gated: gl.constexpr,
    early: gl.constexpr,
):
    """The loading warp: as many tiles of the weight as there is room for, then their rows of x, then both in turn."""
    output, first = gl.program_id(0) * outputs, gl.program_id(1) * steps
    nbytes: gl.constexpr = ((2 * outputs if gated else outputs) + block) * elements * 2
    ahead = gl.minimum(steps, stages)
    for step in range(ahead):
        mbarrier.expect(full.index(step), nbytes)
        _ask(weight_boxes, weights, full, step, output, (first + step) * elements, n, gated)
    if early:
        gdc_wait()
    for step in range(ahead):
        load_box(x_boxes, [0, (first + step) * elements], full.index(step), values.index(step))
    for step in range(ahead, steps):
        stage = step % stages
        mbarrier.wait(empty.index(stage), (step // stages - 1) & 1)
        mbarrier.expect(full.index(stage), nbytes)
        _ask(weight_boxes, weights, full, stage, output, (first + step) * elements, n, gated)
        load_box(x_boxes, [0, (first + step) * elements], full.index(stage), values.index(stage))


@gluon.jit
def _compute(
    out,
    values,
    weights,
    full,
    empty,
    rows,
    n,
    steps,
    which: gl.constexpr,
    block: gl.constexpr,
    outputs: gl.constexpr,
    stages: gl.constexpr,
    activation: gl.constexpr,
    early: gl.constexpr,
):
    """A warp group: half `which` of the outputs, of all rows."""
    gated: gl.constexpr = activation != "none"
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block, 16])
    plain: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    sums = gl.zeros([64, block], gl.float32, layout=layout)
    if gated:
        others = gl.zeros([64, block], gl.float32, layout=layout)
    for step in range(steps):
        stage = step % stages
        mbarrier.wait(full.index(stage), (step // stages) & 1)
        columns = values.index(stage).permute((1, 0))
        if gated:
            flying = warpgroup_mma(weights.index(stage * 4 + which * 2), columns, sums, is_async=True)
            beside = warpgroup_mma(weights.index(stage * 4 + which * 2 + 1), columns, others, is_async=True)
            sums, others = warpgroup_mma_wait(0, deps=[flying, beside])
        else:
            flying = warpgroup_mma(weights.index(stage * 2 + which), columns, sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[flying])
        thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    if gated:
        sums = activated(sums, activation) * others
    if early:  # what is stored over may be read by the kernel in front
        gdc_wait()
    result = gl.convert_layout(sums.to(out.dtype.element_ty), plain)
    output = gl.program_id(0) * outputs + which * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, plain))
    row = gl.arange(0, block, layout=gl.SliceLayout(0, plain))
    to = out + (gl.program_id(1) * rows + row).to(gl.int64)[None, :] * n + output[:, None]
    gl.store(to, result, mask=(row < rows)[None, :])


@gluon.jit(do_not_specialize=["rows"])
def dot_rows(
    x_boxes,
    weight_boxes,
    out,
    rows,
    n,
    steps,
    block: gl.constexpr,
    outputs: gl.constexpr,
    elements: gl.constexpr,
    stages: gl.constexpr,
    activation: gl.constexpr,
    early: gl.constexpr,
):
    """``x @ weight.T``, or ``activation(gate) * up`` of it, [parts, rows, n]; see `product_kernels.dot_linear`.

    Boxes: x [block, elements] of [rows, k], rows behind the last read as zero; weight [64, elements] of [n, k], or of
    [2 * n, k], gate first. A part has `steps` tiles of `elements`.
    """
    gated: gl.constexpr = activation != "none"
    pieces: gl.constexpr = 4 if gated else 2
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    values = gl.allocate_shared_memory(x_boxes.dtype, [stages, block, elements], layout)
    weights = gl.allocate_shared_memory(x_boxes.dtype, [stages * pieces, 64, elements], layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    if early:
        gdc_launch_dependents()
    thread_barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (_compute, (out, values, weights, full, empty, rows, n, steps, 0, block, outputs, stages, activation,
                        early)),
            (_compute, (out, values, weights, full, empty, rows, n, steps, 1, block, outputs, stages, activation,
                        early)),
            (_load, (x_boxes, weight_boxes, values, weights, full, empty, n, steps, block, outputs, elements, stages,
                     gated, early)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on


class HopperProducts:
    """Launches the kernel.

    Args:
        starts: the launch's options where it may start early, else none.
        multiprocessors: of the device.
    """

    def __init__(self, starts: dict[str, bool], multiprocessors: int) -> None:
        self._starts, self._multiprocessors = starts, multiprocessors
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        boxes = partial(Boxes, make=partial(TensorDescriptor, layout=layout))
        self._weight_boxes = boxes((64, ELEMENTS))
        self._x_boxes = {block: boxes((block, ELEMENTS)) for block in (64, 128)}
        self._launch = Launcher(dot_rows)

    def parts(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> int:
        """Into how many parts the elements of a row are cut so that each program has a multiprocessor; one if gated.

        0 where this is not the fastest product for x [..., k] and weight [outputs, k], or cannot be. One that is not
        gated is so behind a gated one of k outputs alone, which it lets begin early.
        """
        (n, k), rows = weight.shape, x.numel() // x.shape[-1]
        n = n // 2 if gated else n
        if not FEWEST_ROWS <= rows <= MOST_ROWS or weight.numel() < LARGE_WEIGHT or bias is not None:
            return 0
        half = x.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype
        if not half or n % OUTPUTS or x.data_ptr() % 16 or weight.data_ptr() % 16:
            return 0
        tiles = n // OUTPUTS
        if gated:
            return int(k % ELEMENTS == 0 and self._fill(tiles))
        most = min(self._multiprocessors // tiles, k // FEWEST_ELEMENTS)
        parts = next((count for count in range(most, 0, -1) if k % (count * ELEMENTS) == 0), 0)
        return parts if self._fill(k // OUTPUTS) and self._fill(parts * tiles) else 0

    def _fill(self, programs: int) -> bool:
        return FILLED * self._multiprocessors <= programs <= self._multiprocessors

    def dot(self, x: torch.Tensor, weight: torch.Tensor, parts: int, activation: str = "none") -> torch.Tensor:
        """``x @ weight.T``, or ``activation(gate) * up`` of it, [parts, ..., outputs], as `Products.dot`."""
        x, (n, k), gated = x.contiguous(), weight.shape, activation != "none"
        rows, n = x.numel() // k, n // 2 if gated else n
        block = 64 if rows <= 64 else 128
        out = x.new_empty((parts, *x.shape[:-1], n), dtype=torch.float32 if parts > 1 else None)
        self._launch(
            (n // OUTPUTS, parts),
            self._x_boxes[block](x, (rows, k), (k, 1)),
            self._weight_boxes(weight, tuple(weight.shape), (k, 1)),
            out,
            rows,
            n,
            k // ELEMENTS // parts,
            block,
            OUTPUTS,
            ELEMENTS,
            STAGES[block, gated],
            activation,
            bool(self._starts),
            num_warps=4,
            **self._starts,
        )
        return out
