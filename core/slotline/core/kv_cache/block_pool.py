"""Block pool: reference counts of the KV cache's blocks, and the index of cached prefixes.

Block 0 is the null block: tables point to it if nothing is stored, and it is never handed out. A block without
references can still be found by its hash until it is reused. The least recently released block is reused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from slotline.registry.contracts import BlockHash, CacheBlock
from slotline.registry.errors import CapacityError, IntegrityError

NULL_BLOCK = 0
FEW = 8
"""Number of blocks above which one array operation is faster than a loop."""


class BlockPool:
    """Reference counts, a least-recently-used free list, and the index of cached blocks.

    Attributes:
        num_blocks: number of blocks, including the null block.
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
        """Return the number of blocks without references."""
        return len(self._free)

    def findable(self) -> dict[int, tuple[int, BlockHash]]:
        """Return the cache group and the hash of each block with cached contents. Any thread may call it."""
        return self._hash_of.copy()

    def lookup(self, group: int, block_hash: BlockHash) -> int | None:
        """Return the block of a cache group that holds the prefix with this hash, or None."""
        return self._block_of.get((group, block_hash))

    def lookup_all(self, group: int, hashes: Sequence[BlockHash]) -> Iterator[int | None]:
        """Call `lookup` for each of `hashes`, when its answer is taken."""
        return map(self._block_of.get, [(group, one) for one in hashes])

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return the number of different blocks among `blocks` that have no reference."""
        return len(self._free.keys() & blocks)

    def allocate(self, count: int, on_evict: Sequence[Callable[[CacheBlock], None]] = ()) -> list[int]:
        """Take `count` free blocks with one reference each, and forget their cached contents.

        Args:
            count: number of blocks.
            on_evict: functions called with each cached block among them.

        Raises:
            CapacityError: if fewer are free. Nothing is taken then.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} blocks needed, {len(self._free)} free", fix="give the cache more memory")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        if self._hash_of:
            for block in blocks:
                if (key := self._forget(block)) is not None:
                    for note in on_evict:
                        note(CacheBlock(*key, block))
        if count > FEW:
            self.ref_count[blocks] = 1
        else:
            for block in blocks:
                self.ref_count[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to cached blocks, taking them off the free list if they had none. Leave out placeholders."""
        for block in self._free.keys() & blocks:
            del self._free[block]
        np.add.at(self.ref_count, np.array([block for block in blocks if block > NULL_BLOCK], np.intp), 1)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference of each block. The last block of a sequence is reused first."""
        if not (held := [block for block in reversed(blocks) if block != NULL_BLOCK]):
            return
        np.subtract.at(self.ref_count, held, 1)
        left = self.ref_count[held]
        if left.min() < 0:
            block = held[int(np.flatnonzero(left < 0)[0])]
            raise IntegrityError(f"block {block} is released more often than it was taken")
        free, cached = self._free, self._hash_of
        for block, count in zip(held, left.tolist(), strict=True):
            if count == 0:
                free[block] = None
                if block not in cached:  # not cached: reuse it before any cached block
                    free.move_to_end(block, last=False)

    def remember(self, group: int, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> list[int]:
        """Make full blocks findable. If a prefix is cached already, its first block stays the findable block.

        Return the places of `blocks` that are copies of other findable ones.
        """
        block_of, hash_of, copies = self._block_of, self._hash_of, list[int]()
        for place, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
            if block == NULL_BLOCK:
                continue
            if block_of.setdefault((group, block_hash), block) != block:
                copies.append(place)
            else:
                hash_of[block] = group, block_hash
        return copies

    def drop(self, blocks: Iterable[CacheBlock]) -> list[int]:
        """Forget the blocks' cached contents, unless a block was reused since. Return those forgotten."""
        dropped = [one.block for one in blocks if self.lookup(one.group, one.block_hash) == one.block]
        for block in dropped:
            self._forget(block)
            if self.ref_count[block] == 0:
                self._free.move_to_end(block, last=False)
        return dropped

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget the cached contents of blocks in use."""
        for block in blocks:
            self._forget(block)

    def reset(self) -> None:
        """Forget all cached prefixes. Blocks in use stay in use."""
        self._hash_of.clear()
        self._block_of.clear()

    def restore(self) -> None:
        """Drop all references, whatever state the pool is in. Cached blocks stay findable."""
        self.ref_count[:] = 0
        self._block_of = {key: block for block, key in self._hash_of.items()}
        self._hash_of = {block: key for key, block in self._block_of.items()}
        for block in range(1, self.num_blocks):
            if block not in self._free:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def check(self) -> None:
        """Raise IntegrityError unless counts, free list and hash index agree."""
        free = {int(b) for b in np.flatnonzero(self.ref_count == 0)} - {NULL_BLOCK}
        if wrong := sorted(free ^ set(self._free)):
            raise IntegrityError(f"free list and reference counts differ on blocks {wrong[:8]}")
        if self.ref_count.min() < 0 or self.ref_count[NULL_BLOCK] != 0:
            raise IntegrityError("a reference count is negative or the null block is held")
        if {block: key for key, block in self._block_of.items()} != self._hash_of:
            raise IntegrityError("the hash index and the blocks' hashes differ")

    def _forget(self, block: int) -> tuple[int, BlockHash] | None:
        """Remove the block from the hash index and return its key, or None."""
        if (key := self._hash_of.pop(block, None)) is not None:
            del self._block_of[key]
        return key
