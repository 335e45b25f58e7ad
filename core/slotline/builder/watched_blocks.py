"""A block pool and block tables that note which blocks change hands, for plugins that keep something for each block.

They take the place of the plain ones where a plugin declares `block_events`. See
`slotline.registry.contracts.block_events`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field

from slotline.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.planner.plan import Planned
from slotline.registry.contracts import BlockEvents, BlockHash, CacheBlock

Int = npt.NDArray[np.int64]


class Taken(Enum):
    """How a block got its first holder, or other contents than a step wrote."""

    GIVEN = "given"
    RESTORED = "restored"
    LOADED = "loaded"
    MOVED = "moved"


@define(eq=False)
class BlockLog:
    """What happened to blocks since the events were last taken.

    Attributes:
        owners: the cache group of each block that a row has got, by block.
    """

    owners: dict[int, int] = field(factory=dict)
    _told: dict[int, int] = field(factory=dict, init=False)  # group of each block that listeners know to be held
    _returned: dict[int, int] = field(factory=dict, init=False)  # group that listeners know, by block
    _taken: dict[int, tuple[Taken, BlockHash]] = field(factory=dict, init=False)
    _unheard: set[int] = field(factory=set, init=False)  # cached, with contents that listeners have not heard of

    def give(self, blocks: Iterable[int]) -> None:
        """Note new blocks."""
        for block in blocks:
            self._taken[block] = Taken.GIVEN, b""
            self._unheard.discard(block)

    def load(self, block: CacheBlock) -> None:
        """Note that a block which was given is filled by an extension."""
        self._taken[block.block] = Taken.LOADED, block.block_hash
        self._unheard.add(block.block)

    def restore(self, block: int, block_hash: BlockHash) -> None:
        """Note a cached block that nobody held."""
        self._taken[block] = Taken.LOADED if block in self._unheard else Taken.RESTORED, block_hash

    def move(self, blocks: Iterable[int]) -> None:
        """Note blocks of a request whose contents were moved there from other blocks of it."""
        for block in blocks:
            self._taken[block] = Taken.MOVED, b""
            self._unheard.discard(block)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Note blocks that nobody holds any more."""
        for block in blocks:
            self._taken.pop(block, None)
            if (group := self._told.pop(block, None)) is not None:
                self._returned[block] = group

    def lose(self, cached: Iterable[int]) -> None:
        """Note that nobody holds any block, and that the events of `cached` blocks may not have been heard."""
        self.give_back(list(self._told))
        self._taken.clear()
        self._unheard.update(cached)

    def take(self, num_groups: int, coming: Collection[int] = ()) -> list[BlockEvents]:
        """Return the events of each cache group in which there are any, and forget them.

        Args:
            num_groups: cache groups.
            coming: blocks whose contents are still on their way. Their events are kept for later.
        """
        if not self._returned and not self._taken:
            return []
        returned: list[list[int]] = [[] for _ in range(num_groups)]
        for block, group in self._returned.items():
            returned[group].append(block)
        taken: list[dict[Taken, list[tuple[int, BlockHash]]]] = [{how: [] for how in Taken} for _ in range(num_groups)]
        kept = {block: how for block, how in self._taken.items() if block in coming} if coming else {}
        for block, (how, block_hash) in self._taken.items():
            if block not in kept:
                self._told[block] = group = self.owners[block]
                taken[group][how].append((block, block_hash))
                self._unheard.discard(block)
        self._returned, self._taken = {}, kept
        return [
            BlockEvents(
                group=group,
                returned=_blocks(left),
                **{how.value: _blocks([block for block, _ in found]) for how, found in each.items()},
                hashes=tuple(one for how in (Taken.RESTORED, Taken.LOADED) for _, one in each[how]),
            )
            for group, (left, each) in enumerate(zip(returned, taken, strict=True))
            if left or any(each.values())
        ]


class WatchedPool(BlockPool):
    """Block pool that notes in `log` which blocks get their first holder and lose their last one."""

    def __init__(self, num_blocks: int, log: BlockLog) -> None:
        super().__init__(num_blocks)
        self.log = log

    def allocate(self, count: int, on_evict: Sequence[Callable[[CacheBlock], None]] = ()) -> list[int]:
        """See `BlockPool.allocate`."""
        blocks = super().allocate(count, on_evict)
        self.log.give(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """See `BlockPool.share`."""
        for block in dict.fromkeys(blocks):
            if block in self._free:
                self.log.restore(block, self._hash_of[block][1])
        super().share(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """See `BlockPool.release`."""
        super().release(blocks)
        self.log.give_back(block for block in blocks if block != NULL_BLOCK and self.ref_count[block] == 0)

    def restore(self) -> None:
        """See `BlockPool.restore`."""
        super().restore()
        self.log.lose(self._hash_of)


class WatchedGroup(CacheGroup):
    """Block tables of a cache group that note in `log` which blocks are the group's."""

    def __init__(self, log: BlockLog, *given: Any) -> None:
        super().__init__(*given)
        self.log = log

    def extend(self, row: int, blocks: Sequence[int]) -> None:
        """See `CacheGroup.extend`."""
        self.log.owners.update(dict.fromkeys(blocks, self.index))
        super().extend(row, blocks)

    def extend_all(self, rows: Int, counts: Int, blocks: list[int]) -> None:
        """See `CacheGroup.extend_all`."""
        self.log.owners.update(dict.fromkeys(blocks, self.index))
        super().extend_all(rows, counts, blocks)


def listens(planned: Planned) -> bool:
    """Return whether a plugin of the plan hears of blocks."""
    return any(carrier.name == "block_events" for carrier in planned.carriers)


def group_maker(planned: Planned) -> Callable[..., CacheGroup]:
    """Return the function that makes the cache groups of a plan, with one log for all if plugins hear of blocks."""
    return partial(WatchedGroup, BlockLog()) if listens(planned) else CacheGroup


def in_kernel_blocks(events: BlockEvents, ratio: int) -> BlockEvents:
    """Return events in kernel blocks, of which each block has `ratio`."""
    if ratio == 1:
        return events
    parts = {
        name: (getattr(events, name)[:, None] * ratio + np.arange(ratio)).reshape(-1)
        for name in ("returned", "given", "restored", "loaded", "moved")
    }
    return evolve(events, **parts, hashes=tuple(one for one in events.hashes for _ in range(ratio)))


def _blocks(found: list[int]) -> Int:
    """Return blocks as an array that cannot be written, since all listeners get the same."""
    array = np.array(found, np.int64)
    array.setflags(write=False)
    return array
