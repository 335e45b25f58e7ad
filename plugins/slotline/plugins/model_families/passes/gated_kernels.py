"""Gate, up and activation of many rows in one Triton kernel: the product that would be activated is never stored.

Programs stay and take tile after tile, and the copies for the next one begin while the present one is finished.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from slotline.plugins.model_families.passes.triton_kernels import activated


@triton.jit
def _place(number, row_tiles, column_tiles, group: tl.constexpr):
    """Return row and column of a tile: column by column within `group` rows of tiles, which stay in the L2 cache."""
    first = number // (group * column_tiles) * group
    height = tl.minimum(row_tiles - first, group)
    within = number % (group * column_tiles)
    return first + within % height, within // height


@triton.jit(do_not_specialize=["rows"])
def gated_linear(
    x,
    weight,
    out,
    rows,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
    programs: tl.constexpr,
    activation: tl.constexpr,
):
    """Compute activation(gate) * up in tiles of `block_m` rows and `block_n` outputs.

    Boxes: x [block_m, block_k] of [rows, k], weight [2, block_n, block_k] of [2, n, k] with gate first, out [block_m,
    block_n] of [rows, n]. Elements outside are read as zero and not written. A tile's gate and up are one product, so
    that each row of x is read from shared memory once for both.
    """
    row_tiles, column_tiles = tl.cdiv(rows, block_m), tl.cdiv(n, block_n)
    for number in tl.range(tl.program_id(0), row_tiles * column_tiles, programs, flatten=True):
        row, column = _place(number, row_tiles, column_tiles, group)
        sums = tl.zeros([block_m, 2 * block_n], tl.float32)
        for start in tl.range(0, k, block_k):
            values = x.load([row * block_m, start])
            weights = weight.load([0, column * block_n, start]).reshape(2 * block_n, block_k)
            sums = tl.dot(values, weights.T, sums)
        gate, up = sums.reshape(block_m, 2, block_n).permute(0, 2, 1).split()
        out.store([row * block_m, column * block_n], (activated(gate, activation) * up).to(out.dtype))
