"""Block tables of a cache group, a set of layers that share them.

Its `kv_spec` plugin decides which blocks it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slotline.core.batch.request_table import NO_LIMIT
from slotline.core.kv_cache.block_pool import NULL_BLOCK
from slotline.registry.contracts import KVSpec

Int = npt.NDArray[np.int64]


class CacheGroup:
    """The block tables of one cache group.

    Attributes:
        spec: the kv_spec plugin's object.
        block_size: tokens of a manager block, which consists of `ratio` kernel blocks.
        table: [max_requests + 1, max_kernel_blocks] int32, kernel blocks by row. Unused entries are the null
            block, and so is the whole last row, which serves padded requests.
        versions: [max_requests + 1] int64, the number of changes of each row of the table. A copy is outdated if it has
            another number.
        blocks: manager blocks of each row, in order.
        capacity: [max_requests] int64, tokens that the row's blocks can hold.
        num_freed: [max_requests] int64, leading blocks given back early.
        fixed_len: [max_requests] int64, the keys that each row has blocks for, all from its first step on. None if the
            blocks are for the sequence's own tokens.
        num_held: [max_requests] int64, manager blocks of each row.
        num_replaced: changes so far of tables in which others took the place of blocks.
        needed, freeable: [max_model_len + 1] int64, the spec's blocks for each number of tokens, and for each number of
            computed tokens. Precomputed, so that steps do not call the spec.
    """

    def __init__(
        self,
        index: int,
        spec: KVSpec,
        block_size: int,
        kernel_block_size: int,
        max_requests: int,
        max_model_len: int,
        fixed_len: Int | None = None,
    ):
        self.index = index
        self.fixed_len = fixed_len
        self.spec = spec
        self.block_size = block_size
        self.ratio = block_size // kernel_block_size
        self.table = np.zeros((max_requests + 1, spec.blocks_needed(max_model_len) * self.ratio), np.int32)
        self.versions = np.zeros(max_requests + 1, np.int64)
        self.blocks: list[list[int]] = [[] for _ in range(max_requests)]
        self.num_held = np.zeros(max_requests, np.int64)
        self.capacity = np.zeros(max_requests, np.int64)
        self.num_freed = np.zeros(max_requests, np.int64)
        self.num_replaced = 0
        self.needed: Int = np.fromiter(map(spec.blocks_needed, range(max_model_len + 1)), np.int64)
        self.frees_early = spec.blocks_freeable(max_model_len) > 0
        lengths = range(max_model_len + 1 if self.frees_early else 0)
        self.freeable: Int = np.fromiter(map(spec.blocks_freeable, lengths), np.int64)
        self._blocks_at_most = int(self.needed[-1])
        self._offsets = np.arange(self.ratio, dtype=np.int32)

    def missing(self, rows: Int, num_tokens: Int) -> Int:
        """Return the blocks [n] to add before each of `rows` can hold `num_tokens` [n]."""
        if self.fixed_len is None:
            needed = self.needed[num_tokens]
        else:
            needed = np.array([self.spec.blocks_needed(length) for length in self.fixed_len[rows].tolist()])
        lacking: Int = np.maximum(needed - self.num_held[rows], 0)
        return lacking

    def blocks_needed(self, row: int, num_tokens: int) -> int:
        """Return the blocks in the row's table when its sequence has `num_tokens`."""
        return self.spec.blocks_needed(num_tokens if self.fixed_len is None else int(self.fixed_len[row]))

    def columns(self, longest: int, kernel_block_size: int) -> int:
        """Return the columns of the table that sequences of up to `longest` tokens need."""
        return -(-longest // kernel_block_size) if self.fixed_len is None else self.table.shape[1]

    def extend(self, row: int, blocks: Sequence[int]) -> None:
        """Append manager blocks to the row's table."""
        held = self.blocks[row]
        start = len(held) * self.ratio
        ids = blocks if self.ratio == 1 else self.kernel_blocks(blocks)  # hot path: no array for a block or two
        self.table[row, start : start + len(blocks) * self.ratio] = ids
        self.versions[row] += 1
        held.extend(blocks)
        self.num_held[row] = len(held)
        self.capacity[row] = self._capacity(len(held))

    def extend_all(self, rows: Int, counts: Int, blocks: list[int]) -> None:
        """Call `extend` for each of `rows` [n], which are distinct, with `counts` [n] of the blocks, in order."""
        if self.ratio > 1 or self.fixed_len is not None or (counts > 1).any():
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
                self.extend(row, blocks[:count])
                blocks = blocks[count:]
            return
        rows = rows[counts > 0]
        for row, block in zip(rows.tolist(), blocks, strict=True):
            self.blocks[row].append(block)
        self.table[rows, self.num_held[rows]] = blocks
        self.versions[rows] += 1
        self.num_held[rows] += 1
        self.capacity[rows] = self._capacity(self.num_held[rows])

    def _capacity(self, num_blocks: Int | int) -> Int:
        """Return the tokens that this number of a row's blocks holds."""
        everything = (np.asarray(num_blocks) >= self._blocks_at_most) | (self.fixed_len is not None)
        return np.where(everything, NO_LIMIT, np.asarray(num_blocks) * self.block_size)

    def kernel_blocks(self, blocks: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return the kernel blocks of manager blocks, in order. The null block maps to kernel block 0."""
        manager = np.asarray(blocks, np.int32)[:, None]
        kernel = manager * self.ratio + self._offsets  # [len(blocks), ratio]
        return np.where(manager == NULL_BLOCK, np.int32(NULL_BLOCK), kernel).reshape(-1)

    def free_leading(self, row: int, num_computed_tokens: int) -> list[int]:
        """Replace blocks that no later token reads by the null block in the table, and return them."""
        first, last = int(self.num_freed[row]), int(self.freeable[num_computed_tokens])
        freed = self.blocks[row][first:last]
        self.blocks[row][first:last] = [NULL_BLOCK] * (last - first)
        self.table[row, first * self.ratio : last * self.ratio] = NULL_BLOCK
        self.versions[row] += 1
        self.num_replaced += 1
        self.num_freed[row] = last
        return freed

    def merge(self, row: int, place: int, block: int) -> int:
        """Put a block with equal contents in the place of one of the row's, and return that one."""
        own, self.blocks[row][place] = self.blocks[row][place], block
        self.table[row, place * self.ratio : (place + 1) * self.ratio] = self.kernel_blocks([block])
        self.versions[row] += 1
        self.num_replaced += 1
        return own

    def restore(self) -> None:
        """Empty the tables of all rows, even if a table was only partly written."""
        self.table[:] = NULL_BLOCK
        self.versions += 1
        self.blocks[:] = [[] for _ in self.blocks]
        self.capacity[:] = self.num_freed[:] = self.num_held[:] = 0

    def clear(self, row: int) -> list[int]:
        """Empty the row's table and return its blocks."""
        held, self.blocks[row] = self.blocks[row], []
        self.table[row, : len(held) * self.ratio] = NULL_BLOCK
        self.versions[row] += 1
        self.capacity[row] = self.num_freed[row] = self.num_held[row] = 0
        return held
