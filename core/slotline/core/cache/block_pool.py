"""The block pool: who holds which block of the KV cache, and which blocks hold a reusable prefix.

Block 0 is the null block: tables point to it where nothing is stored, and it is never handed out. A block without
references stays findable by its hash until it is taken for something else; the least recently released goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from slotline.registry.contracts import BlockHash
from slotline.registry.errors import CapacityError, IntegrityError

NULL_BLOCK = 0


class BlockPool:
    """Reference counts, a least-recently-used free list, and the index of cached blocks.

    Attributes:
        num_blocks: blocks in all, the null block included.
        ref_count: [num_blocks] int32.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise CapacityError(f"a pool of {num_blocks} blocks holds nothing", fix="give the cache more memory")
        self.num_blocks = num_blocks
        self.ref_count = np.zeros(num_blocks, np.int32)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._hash_of: dict[int, tuple[int, BlockHash]] = {}
        self._block_of: dict[tuple[int, BlockHash], int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without references."""
        return len(self._free)

    def lookup(self, group: int, block_hash: BlockHash) -> int | None:
        """The block of a cache group that holds the prefix with this hash, or None."""
        return self._block_of.get((group, block_hash))

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks with one reference each; what they cached is forgotten.

        Raises:
            CapacityError: if fewer are free; nothing is taken then.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} blocks needed, {len(self._free)} free", fix="give the cache more memory")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self.ref_count[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to cached blocks, taking them off the free list if nobody held them."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self.ref_count[block] == 0:
                del self._free[block]
            self.ref_count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference of each block; the last block of a sequence becomes the first to be taken again."""
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            if self.ref_count[block] <= 0:
                raise IntegrityError(f"block {block} is released more often than it was taken")
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:  # nothing to find there: take it before any cached block
                    self._free.move_to_end(block, last=False)

    def remember(self, group: int, block: int, block_hash: BlockHash) -> None:
        """Make a full block findable. If the prefix is cached already, the first block stays the findable one."""
        key = (group, block_hash)
        if key not in self._block_of and block != NULL_BLOCK:
            self._block_of[key] = block
            self._hash_of[block] = key

    def reset(self) -> None:
        """Forget all cached prefixes; blocks in use stay in use."""
        self._hash_of.clear()
        self._block_of.clear()

    def check(self) -> None:
        """Raise IntegrityError unless counts, free list and hash index agree."""
        free = {int(b) for b in np.flatnonzero(self.ref_count == 0)} - {NULL_BLOCK}
        if free != set(self._free):
            raise IntegrityError(
                f"free list and reference counts differ on blocks {sorted(free ^ set(self._free))[:8]}"
            )
        if self.ref_count.min() < 0 or self.ref_count[NULL_BLOCK] != 0:
            raise IntegrityError("a reference count is negative or the null block is held")
        if {block: key for key, block in self._block_of.items()} != self._hash_of:
            raise IntegrityError("the hash index and the blocks' hashes differ")

    def _forget(self, block: int) -> None:
        key = self._hash_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
