"""KV cache manager: blocks for the rows, and the index of cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import NO_LIMIT, RequestTable
from slotline.core.kv_cache.block_hashes import extend_hashes, hash_sizes
from slotline.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.registry.contracts import BlockHash, CacheBlock
from slotline.registry.errors import IntegrityError

Int = npt.NDArray[np.int64]

HASHED_TOGETHER = 8
"""Full blocks of hashing of a row that are hashed at a time, unless a prefix is looked up earlier. Hashing them singly
costs several times as much. The blocks of prompts, whose hashes are known, do not wait for others.
"""
TO_FILL = -1
"""Placeholder in a prefix for a block that the pool does not hold and an extension fills."""


class KVCacheManager:
    """Allocator of the rows' blocks, with prefix caching.

    Prefixes are hashed in pieces of `hash_block_size` tokens, which divides each group's block size. A group's block is
    found by the hash of its last piece. All groups must agree on a prefix, so its length is a multiple of `prefix_unit`
    tokens, whole blocks of each group. An extension may allow only some of these prefixes.

    Args:
        pool: the blocks.
        groups: the cache groups.
        prefix_caching: find and keep cached prefixes.
        prefix_unit: tokens of a unit for a model without cache groups.
        extensions: methods of the step extensions, some of which fill blocks or hear of them.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[CacheGroup],
        *,
        prefix_caching: bool,
        prefix_unit: int = 1,
        extensions: Extensions = NO_EXTENSIONS,
    ) -> None:
        self.pool = pool
        self.groups = tuple(groups)
        self.prefix_caching = prefix_caching
        self.hash_block_size, self.prefix_unit = hash_sizes(groups, prefix_unit)
        self.extensions = extensions
        # Blocks that are given back early or that an extension hears of must be findable by then.
        at_once = bool(extensions.blocks_filled) or any(group.frees_early for group in groups)
        self._together = 1 if at_once else HASHED_TOGETHER
        num_rows = max((len(group.capacity) for group in groups), default=0)
        self._full, self._findable = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)  # pieces, by row
        self._rows: RequestTable | None = None  # rows of the last commit

    def rows_short(self, rows: Int, num_tokens: Int) -> Int:
        """Return the positions in `rows` whose blocks cannot hold `num_tokens` yet."""
        short = np.zeros(len(rows), bool)
        for group in self.groups:
            short |= group.capacity[rows] < num_tokens
        return np.flatnonzero(short)

    def try_grow(self, row: int, num_tokens: int) -> bool:
        """Give the row blocks for `num_tokens`. Return False, with nothing taken, if the pool has too few."""
        return self.try_grow_all(np.array([row]), np.array([num_tokens]))

    def try_grow_all(self, rows: Int, num_tokens: Int, *, spare: int = 0) -> bool:
        """Call `try_grow` for all of `rows` [n], which are distinct, with `num_tokens` [n] each, or for none of them.

        None is grown if the pool would have fewer than `spare` blocks left.
        """
        missing = [group.missing(rows, num_tokens) for group in self.groups]
        totals = [int(counts.sum()) for counts in missing]
        if sum(totals) + spare > self.pool.num_free:
            return False
        blocks = self.pool.allocate(sum(totals), self.extensions.block_evicted)
        for group, counts, total in zip(self.groups, missing, totals, strict=True):
            group.extend_all(rows, counts, blocks[:total])
            blocks = blocks[total:]
        return True

    def find_prefix(self, request: Request, token_ids: npt.NDArray[np.int32]) -> tuple[int, list[list[int]]]:
        """Find the longest cached prefix of `token_ids`, without the last token.

        Returns:
            Its length and each group's blocks, with `TO_FILL` for blocks that only an extension can fill.
        """
        if not self.prefix_caching or request.whole_prompt or not (self.groups or self.extensions.limit_prefix):
            return 0, [[] for _ in self.groups]
        self._remember_full(np.flatnonzero(self._full > self._findable))
        length = (len(token_ids) - 1) // self.prefix_unit * self.prefix_unit
        hashes = extend_hashes(request, token_ids, length // self.hash_block_size, self.hash_block_size)
        while True:  # a group may read other blocks for a shorter prefix: repeat until all agree
            for limit in self.extensions.limit_prefix:
                length = limit(request, self._units(hashes, length)) * self.prefix_unit
            hits = [self._hit(request, group, hashes, length) for group in self.groups]
            agreed = min((len(hit) * g.block_size for hit, g in zip(hits, self.groups, strict=True)), default=length)
            if agreed == length or (len(self.groups) == 1 and not self.extensions.limit_prefix):
                return agreed, hits
            length = agreed // self.prefix_unit * self.prefix_unit

    def reset(self) -> None:
        """Forget all cached prefixes. Blocks that requests hold stay theirs."""
        np.maximum(self._findable, self._full, out=self._findable)
        self.pool.reset()
        for forget in self.extensions.forget_prefixes:
            forget()

    def restore(self) -> None:
        """Take all blocks from all rows, whatever state they are in. Blocks known to be computed stay findable."""
        for group in self.groups:
            group.restore()
        self._full[:] = self._findable[:] = 0
        self.pool.restore()

    def try_admit(self, row: int, prefix: list[list[int]], num_tokens: int, hashes: Sequence[BlockHash] = ()) -> bool:
        """Take the cached and new blocks for `num_tokens`. Return False, with nothing taken, if the pool has too few.

        Args:
            row: the row that gets the blocks.
            prefix: each group's cached blocks, as `find_prefix` returns them.
            num_tokens: tokens that the row must hold.
            hashes: of the pieces of the row's tokens, as far as the prefix has blocks to fill.
        """
        wake = sum(map(self.pool.num_free_among, prefix))
        new = sum(g.blocks_needed(row, num_tokens) - len(p) for g, p in zip(self.groups, prefix, strict=True))
        if wake + new + sum(blocks.count(TO_FILL) for blocks in prefix) > self.pool.num_free:
            return False
        self.pool.share([block for blocks in prefix for block in blocks])
        for group, blocks in zip(self.groups, prefix, strict=True):
            group.extend(row, self._filling(group, blocks, hashes) if TO_FILL in blocks else blocks)
            self._full[row] = self._findable[row] = len(blocks) * group.block_size // self.hash_block_size
        return self.try_grow(row, num_tokens)

    def tokens_to_fill(self, prefix: list[list[int]]) -> int:
        """Return the tokens of a prefix whose blocks an extension fills, in the group with the most of them."""
        counts = (blocks.count(TO_FILL) * g.block_size for g, blocks in zip(self.groups, prefix, strict=True))
        return max(counts, default=0)

    def commit(self, rows: RequestTable, changed: Int, after: Int) -> None:
        """Make blocks that became full in a step findable, and give back blocks that no later token reads.

        Args:
            rows: the request table.
            changed: the step's rows.
            after: number of computed tokens after the step, by entry of `changed`.
        """
        if self.prefix_caching and self.groups:
            self._rows = rows
            self._full[changed] = full = after // self.hash_block_size
            findable, of_prompts = self._findable[changed], rows.num_prompt_tokens[changed] // self.hash_block_size
            at_once = np.minimum(full, of_prompts) > findable  # others may share them
            self._remember_full(changed[at_once | (full - findable >= self._together)])
        for group in self.groups:
            if group.frees_early:
                for i in np.flatnonzero(group.freeable[after] > group.num_freed[changed]).tolist():
                    self.pool.release(group.free_leading(int(changed[i]), int(after[i])))

    def forget(self, row: int) -> None:
        """Make the blocks of a row with wrong keys or values unfindable, and those that it fills from now on."""
        if self.groups:
            self._findable[row] = NO_LIMIT
        for group in self.groups:
            self.pool.forget(group.blocks[row])

    def release(self, row: int) -> None:
        """Give back all blocks of the row. Cached blocks stay findable until reused."""
        if self.groups:
            if self._full[row] > self._findable[row]:
                self._remember_full(np.array([row]))
            self._full[row] = self._findable[row] = 0
        for group in self.groups:
            self.pool.release(group.clear(row))

    def blocks_for_one(self, num_tokens: int, fixed_len: int = 0) -> int:
        """Return the most blocks that a request of `num_tokens` holds at a time."""
        lengths = [num_tokens if group.fixed_len is None else fixed_len for group in self.groups]
        pairs = zip(self.groups, lengths, strict=True)
        return sum(min(g.spec.blocks_needed(length), g.spec.max_blocks_held()) for g, length in pairs)

    def check(self, rows: RequestTable) -> None:
        """Raise IntegrityError unless tables, reference counts and rows agree."""
        blocks = [block for held in self.extensions.held_blocks for block in held()]
        for group in self.groups:
            unused = np.ones(len(group.blocks), bool)
            for row, own in enumerate(group.blocks):
                if own:
                    unused[row] = False
                    self._check_row(group, row, own, rows)
                    blocks += own
            self._check_rows(group, unused, rows)
        held = np.bincount(blocks, minlength=self.pool.num_blocks) if blocks else np.zeros(self.pool.num_blocks, int)
        held[NULL_BLOCK] = 0
        if not np.array_equal(held, self.pool.ref_count):
            wrong = np.flatnonzero(held != self.pool.ref_count)[:8]
            raise IntegrityError(f"blocks {wrong.tolist()} are held {held[wrong].tolist()} times but count otherwise")
        self.pool.check()

    def _check_row(self, group: CacheGroup, row: int, blocks: list[int], rows: RequestTable) -> None:
        expected, table = group.kernel_blocks(blocks), group.table[row]
        if not np.array_equal(table[: expected.size], expected) or table[expected.size :].any():
            raise IntegrityError(f"the table of row {row} differs from its blocks")
        if rows.requests[row] is None and blocks:
            raise IntegrityError(f"row {row} is free but holds blocks")

    def _check_rows(self, group: CacheGroup, unused: npt.NDArray[np.bool_], rows: RequestTable) -> None:
        """Check what holds for all rows at once. `unused` [max_requests] marks those that hold no blocks."""
        for row in np.flatnonzero(unused & group.table[: unused.size].any(1)):
            raise IntegrityError(f"the table of row {row} differs from its blocks")
        for row in np.flatnonzero(rows.num_computed_tokens[: unused.size] > group.capacity[: unused.size]):
            raise IntegrityError(f"row {row} computed more tokens than its blocks hold")

    def _hit(self, request: Request, group: CacheGroup, hashes: Sequence[BlockHash], length: int) -> list[int]:
        """Return the spec's prefix hit in the first `length` tokens, with blocks that an extension can fill."""
        step = group.block_size // self.hash_block_size
        own = hashes[step - 1 : length // self.hash_block_size : step]
        found = dict(zip(own, self.pool.lookup_all(group.index, own), strict=True))
        lacking = [one for one, block in found.items() if block is None] if self.extensions.find_blocks else []
        for find in self.extensions.find_blocks:
            elsewhere = find(request, group.index, lacking)
            found.update((one, TO_FILL) for one in lacking if one in elsewhere)
        return group.spec.prefix_hit(own, found.get)

    def _filling(self, group: CacheGroup, blocks: list[int], hashes: Sequence[BlockHash]) -> list[int]:
        """Return the `blocks` of a prefix with new blocks in place of those to fill, which are findable from now on."""
        step = group.block_size // self.hash_block_size
        new = iter(self.pool.allocate(blocks.count(TO_FILL), self.extensions.block_evicted))
        own, given = hashes[step - 1 :: step], list(blocks)
        for index, block in enumerate(blocks):
            if block == TO_FILL:
                given[index] = next(new)
                # Ask for it before the block can be found, so that a finder can rely on it being filled or given up.
                for fill in self.extensions.fill_block:
                    fill(CacheBlock(group.index, own[index], given[index]))
                self.pool.remember(group.index, [given[index]], [own[index]])
        return given

    def _units(self, hashes: Sequence[BlockHash], length: int) -> Sequence[BlockHash]:
        """Select the hashes at whole units, up to `length` tokens."""
        step = self.prefix_unit // self.hash_block_size
        return hashes[step - 1 : length // self.hash_block_size : step]

    def _remember_full(self, which: Int) -> None:
        """Make the full blocks of the rows `which` [n] findable."""
        if len(which) == 0 or self._rows is None:
            return
        firsts, ends = self._findable[which], self._full[which]
        for row, first, last in zip(which.tolist(), firsts.tolist(), ends.tolist(), strict=True):
            self._remember(self._rows, row, first, last)
        self._findable[which] = ends

    def _remember(self, rows: RequestTable, row: int, first: int, last: int) -> None:
        """Make the row's blocks that the pieces `first` .. `last` - 1 fill findable."""
        hashes = extend_hashes(rows.request(row), rows.token_ids[row], last, self.hash_block_size)
        for group in self.groups:
            step = group.block_size // self.hash_block_size
            blocks = group.blocks[row][first // step : last // step]
            known = hashes[first // step * step + step - 1 : last : step]
            if copies := self.pool.remember(group.index, blocks, known):
                self._merge(group, row, first // step, copies, known)
                blocks = group.blocks[row][first // step : last // step]
            for note in self.extensions.blocks_filled:
                note(group.index, blocks, known)

    def _merge(
        self, group: CacheGroup, row: int, first: int, copies: Sequence[int], hashes: Sequence[BlockHash]
    ) -> None:
        """Put findable blocks in the place of a row's copies, and give these back. A step in flight may read them yet.

        What is written to them comes after it, as with the blocks of a request that has ended. The places of `copies`
        and `hashes` count from the row's block `first` on.
        """
        filling = {block for held in self.extensions.held_blocks for block in held()}  # an extension may write them yet
        for place in copies:
            block = self.pool.lookup(group.index, hashes[place])
            if block is not None and block not in filling:
                self.pool.share([block])
                self.pool.release([group.merge(row, first + place, block)])
