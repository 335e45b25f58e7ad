"""A block pool that notes which prefixes become findable and which are lost, for those that tell others of them.

It takes the place of the plain pool where an extension declares `prefix_events`. See `slotline.registry.contracts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from attrs import define, field

from slotline.builder.watched_blocks import BlockLog, WatchedGroup, WatchedPool, listens
from slotline.core.kv_cache.block_pool import BlockPool
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.planner.plan import Planned
from slotline.registry.contracts import BlockHash

Key = tuple[int, BlockHash]
"""A cache group, and the hash of a prefix that a block of it ends."""


class PrefixChanges(NamedTuple):
    """What happened to the findable prefixes of a pool, in this order.

    Attributes:
        cleared: whether all were lost first.
        removed: those that are findable no more. None after `cleared`.
        stored: those that became findable, each behind the prefixes that it extends.
    """

    cleared: bool
    removed: list[Key]
    stored: list[Key]


@define(eq=False)
class PrefixLog:
    """Changes that one listener has not heard of. What came and went in between is left out.

    Attributes:
        told: prefixes that the listener knows to be findable.
    """

    pool: BlockPool
    told: set[Key] = field(factory=set, init=False)
    _touched: dict[Key, None] = field(factory=dict, init=False)
    _cleared: bool = field(default=False, init=False)

    def touch(self, keys: Iterable[Key]) -> None:
        """Note prefixes that may have become findable, or lost."""
        for key in keys:
            self._touched.pop(key, None)  # the last one is behind those that it extends
            self._touched[key] = None

    def clear(self) -> None:
        """Note that all prefixes are lost."""
        self._cleared = True
        self.told.clear()
        self._touched.clear()

    def put_back(self, stored: Sequence[Key]) -> None:
        """Note again what could not be told yet."""
        self.told.difference_update(stored)
        self.touch(stored)

    def take(self) -> PrefixChanges | None:
        """Return what has changed since the last call, None for nothing."""
        if not self._touched and not self._cleared:
            return None
        findable, told, removed, stored = self.pool.lookup, self.told, list[Key](), list[Key]()
        for key in self._touched:
            if (there := findable(*key) is not None) != (key in told):
                (stored if there else removed).append(key)
        told.difference_update(removed)
        told.update(stored)
        cleared, self._cleared = self._cleared, False
        self._touched.clear()
        return PrefixChanges(cleared, removed, stored) if cleared or removed or stored else None


class LoggedPool(BlockPool):
    """Block pool with logs of its findable prefixes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._logs: list[PrefixLog] = []

    def listen(self) -> PrefixLog:
        """Return a log of what happens from now on."""
        self._logs.append(log := PrefixLog(self))
        log.touch(self._block_of)
        return log

    def remember(self, group: int, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> list[int]:
        """See `BlockPool.remember`."""
        copies = super().remember(group, blocks, hashes)
        for log in self._logs:
            log.touch((group, one) for one in hashes)
        return copies

    def reset(self) -> None:
        """See `BlockPool.reset`."""
        super().reset()
        for log in self._logs:
            log.clear()

    def restore(self) -> None:
        """See `BlockPool.restore`."""
        super().restore()
        for log in self._logs:
            log.touch(log.told ^ self._block_of.keys())

    def _forget(self, block: int) -> Key | None:
        """See `BlockPool._forget`."""
        if (key := super()._forget(block)) is not None:
            for log in self._logs:
                log.touch((key,))
        return key


class LoggedWatchedPool(LoggedPool, WatchedPool):
    """Block pool that notes both what happens to blocks and what happens to prefixes."""


def tells_prefixes(planned: Planned) -> bool:
    """Return whether replicas of a plan tell the front which prefixes they hold."""
    parallel = planned.loaded.config.parallel
    return (
        parallel.data > 1
        and parallel.routing == "held"
        and planned.plan.prefix_caching
        and bool(planned.plan.cache_groups)
    )


def pool_of(planned: Planned, groups: Sequence[CacheGroup], num_blocks: int) -> BlockPool:
    """Return the pool of a plan. It has logs where plugins read them, and that of `groups` if it is watched."""
    logged = tells_prefixes(planned) or any(one.capabilities.prefix_events for one in planned.all_extensions)
    if not listens(planned):
        return (LoggedPool if logged else BlockPool)(num_blocks)
    logs = [group.log for group in groups if isinstance(group, WatchedGroup)]
    return (LoggedWatchedPool if logged else WatchedPool)(num_blocks, logs[0] if logs else BlockLog())
