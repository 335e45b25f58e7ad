"""Tile sizes of the launches of segmented LoRA."""

from __future__ import annotations

from typing import NamedTuple

MOST_SPLITS = 8
TILE_BYTES = 48 << 10
"""Most bytes of one tile; a multiprocessor holds several."""


class Tiling(NamedTuple):
    """Tile sizes of two launches.

    Attributes:
        splits: parts of a row that are shrunk separately.
        block_k: elements at a time.
        block_n: columns of a program that expands.
        shrink_warps, expand_warps: warps of a program.
    """

    splits: int
    block_k: int
    block_n: int
    shrink_warps: int
    expand_warps: int


FIXED = Tiling(splits=1, block_k=128, block_n=128, shrink_warps=4, expand_warps=4)
"""For any number of small blocks, where numbers must not hang on the batch."""
MANY = Tiling(splits=1, block_k=64, block_n=128, shrink_warps=4, expand_warps=4)
"""For blocks of many tokens."""


def tiling(blocks: int, k: int) -> Tiling:
    """Return the sizes for a number of small blocks of tokens and a row of k elements."""
    splits = 1
    while 2 * splits <= MOST_SPLITS and splits * blocks < 160 and 512 * splits <= k:
        splits *= 2
    return Tiling(splits, block_k=256, block_n=128, shrink_warps=4, expand_warps=4)


def fitting(cut: Tiling, block_m: int, width: int, rank: int, itemsize: int) -> Tiling:
    """Return the sizes, reduced if a tile would not fit into a multiprocessor."""
    block_k, block_n = cut.block_k, cut.block_n
    while block_k > 16 and (block_m + width) * block_k * itemsize > TILE_BYTES:
        block_k //= 2
    while block_n > 16 and rank * block_n * itemsize > TILE_BYTES:
        block_n //= 2
    return cut._replace(block_k=block_k, block_n=block_n, shrink_warps=8 if width >= 256 else cut.shrink_warps)
