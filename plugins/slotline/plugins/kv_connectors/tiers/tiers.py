"""Connectors in order. Any connector can be a tier, also one that knows nothing of tiers.

The blocks that the pool gives up go to the first tier. A tier that `spills` says what it gives up, which goes to the
next one. Behind a tier that does not say it, the next one gets the same blocks as that tier. A block is loaded from the
first tier that holds it. If that is a lower one, it is saved in the first tier again.

A lower tier gets spilled blocks under numbers beyond those of the pool and of states. Its `BlockCopy` copies them from
host memory.

A connector that loads in the step, and keeps its rows, loads beside the steps of others here. A tier from which a token
takes longer than computing one is not asked for some time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from attrs import define, evolve, field

from slotline.plugins.kv_connectors.stores.copies import Copies, Done, devices_of
from slotline.plugins.kv_connectors.stores.pace import Pace
from slotline.plugins.kv_connectors.tiers.speed import TierSpeed
from slotline.registry.contracts import (
    AsyncKVConnector,
    BlockCopyBeside,
    BlockHash,
    CacheBlock,
    CountingKVConnector,
    EvictedBlock,
    KVConnector,
    KVConnectorCapabilities,
    KVConnectorContext,
)

logger = logging.getLogger("slotline")

FINISH_SECONDS = 10.0
"""Time after which `finish` gives up waiting for a device. An asynchronous tier has its own limit."""
HOST_BYTES, DEVICE_BYTES = 16 * 2**20, 64 * 2**20
"""Bytes that a step begins to load at most from a tier that copies beside steps: into caches in host memory while no
request runs, and on GPUs, where it launches the copies."""


@define(eq=False)
class SpillCopy:
    """`BlockCopy` of a tier: blocks from `first` on are rows of host memory.

    Attributes:
        copy: of the caches.
        first: number of the first row.
        beside: whether rows are copied beside forward passes.
        rows: spilled rows, in the order of their numbers.
        begun: tells of each copy to a device that was begun whether it is over.
    """

    copy: BlockCopyBeside
    first: int
    beside: bool = False
    rows: list[torch.Tensor] = field(factory=list)
    begun: list[Done] = field(factory=list)

    def to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """See `BlockCopy`."""
        self.begin_to_host(group, blocks, rows)

    def to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """See `BlockCopy`."""
        if self.beside:
            self.begun.append(self.copy.begin_to_device(group, blocks, rows))
        else:
            self.copy.to_device(group, blocks, rows)

    def begin_to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Done:
        """See `BlockCopyBeside`."""
        own, left = self._of_pool(blocks, rows)
        return self.copy.begin_to_host(group, own, left) if own else lambda: True

    def begin_to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Done:
        """See `BlockCopyBeside`."""
        return self.copy.begin_to_device(group, blocks, rows)

    def _of_pool(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
        """Copy spilled rows. Return the pool's blocks and their rows."""
        own, left = list[int](), list[torch.Tensor]()
        for block, row in zip(blocks, rows, strict=True):
            if block >= self.first:
                row.copy_(self.rows[block - self.first])
            else:
                own.append(block)
                left.append(row)
        return own, left


@define(eq=False)
class Tier:
    """A connector, and what is on its way to and from it.

    Attributes:
        name: of the connector.
        capabilities: of the connector.
        connector: built with `copy`.
        copy: its copies.
        speed: of its loads.
        saves, loads: of the next start.
        under_way: number of loads that are not known to have ended.
        coming: loads of a connector that is not asynchronous, each batch with what says whether its copies are over.
    """

    name: str
    capabilities: KVConnectorCapabilities
    connector: KVConnector
    copy: SpillCopy
    speed: TierSpeed
    under_way: int = 0
    saves: list[CacheBlock] = field(factory=list)
    loads: list[CacheBlock] = field(factory=list)
    coming: list[tuple[list[Done], list[CacheBlock]]] = field(factory=list)

    @property
    def asynchronous(self) -> bool:
        """Return whether its loads end in later steps."""
        return bool(self.capabilities.asynchronous.support)

    def take(self, evicted: EvictedBlock) -> None:
        """Save a block that the tier above gives up. Its bytes are copied now."""
        self.saves.append(CacheBlock(evicted.group, evicted.block_hash, self.copy.first + len(self.copy.rows)))
        self.copy.rows.append(evicted.row.clone())


class Tiers:
    """Connector made of connectors. Implements `AsyncKVConnector` and `CountingKVConnector`."""

    def __init__(self, context: KVConnectorContext) -> None:
        assert context.inner is not None
        self._promote = context.options.promote
        devices = devices_of(context)
        self._copies = Copies(context.copy, devices)
        self._sizes = [group.block_bytes for group in context.groups]
        self._tokens = [0 if group.states else group.block_size for group in context.groups]
        self._pace = None if devices else Pace()  # of copies that the step waits for
        self._saves = WatchedCopies(self._copies)
        self._tiers: list[Tier] = []
        for number, name in enumerate(context.options.tiers):
            copy = SpillCopy(self._saves, context.num_blocks + context.num_states)
            last = number + 1 == len(context.options.tiers)
            evicted = None if last else partial(self._spilled, number + 1)
            capabilities, connector = context.inner(name, evolve(context, copy=copy, evicted=evicted))
            copy.beside = bool(capabilities.own_rows.support) and not capabilities.asynchronous.support
            self._tiers.append(Tier(name, capabilities, connector, copy, TierSpeed(name, context.computing)))
        self._of: dict[int, tuple[int, CacheBlock, float]] = {}  # by block: the tier that it comes from, since when
        self._failed: set[int] = set()
        self._promoted = 0

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        found = [False] * len(hashes)
        for tier in [one for one in self._tiers if not one.speed.pausing]:
            missing = [index for index, here in enumerate(found) if not here]
            for index, here in zip(missing, tier.connector.held(group, [hashes[i] for i in missing]), strict=True):
                found[index] = bool(here)
        return found

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        if self._pace is not None and not self._of:
            self._pace.restart()
        self._failed |= {one.block for one in self._assign(loads)}
        self._save(0, saves)
        written = {one.block for tier in self._tiers for one in tier.loads}
        for tier in self._tiers[1:]:
            tier.saves = [self._set_aside(tier, one) if one.block in written else one for one in tier.saves]
        for tier in self._tiers:
            self._start(tier, 0 if self._pace is not None else DEVICE_BYTES)

    def wait(self) -> None:
        if self._pace is not None:
            self._pace.launched()
        for tier in self._tiers:
            tier.connector.wait()

    def arrived(self) -> Collection[int]:
        self._go_on()
        arrived = set[int]()
        for number, tier in enumerate(self._tiers):
            arrived |= self._arrived_of(number, tier)
        return arrived

    def failed(self) -> Collection[int]:
        for tier in self._tiers:
            self._failed |= set(tier.connector.failed()) & self._of.keys()
        failed, self._failed = self._failed, set()
        for block in failed & self._of.keys():
            self._forget(block)
        return failed

    def finish(self) -> None:
        latest = time.monotonic() + FINISH_SECONDS
        for tier in self._tiers:
            if tier.asynchronous:
                cast("AsyncKVConnector", tier.connector).finish()
            while tier.loads:
                self._start(tier, HOST_BYTES)
            while not all(done() for begun, _ in tier.coming for done in begun) and time.monotonic() < latest:
                time.sleep(0.001)

    def reset(self) -> None:
        for tier in self._tiers:
            self._failed |= {one.block for one in tier.loads}  # not begun, and soon other blocks may have their hashes
            tier.loads, tier.saves = [], []
            tier.copy.rows.clear()
            tier.connector.reset()

    def counts(self) -> Mapping[str, float]:
        found: dict[str, float] = {"promoted": self._promoted}
        for tier in self._tiers:
            found[f"{tier.name}_left_out"] = tier.speed.left_out
            if tier.capabilities.counts.support:
                own = cast("CountingKVConnector", tier.connector).counts()
                found |= {f"{tier.name}_{event}": value for event, value in own.items()}
        return found

    def flush(self, seconds: float) -> bool:
        """Wait until all saves are written. Return False if they are not after so long."""
        waits: list[Callable[[float], bool]] = [
            tier.connector.flush for tier in self._tiers if hasattr(tier.connector, "flush")
        ]
        return all(wait(seconds) for wait in waits)

    def _assign(self, loads: Sequence[CacheBlock]) -> list[CacheBlock]:
        """Give each load to the first tier that holds its block, and is not left out. Return those of none."""
        left, now = list(loads), time.perf_counter()
        for number, tier in sorted(enumerate(self._tiers), key=lambda one: one[1].speed.pausing):
            rest = list[CacheBlock]()
            for group in sorted({one.group for one in left}):
                own = [one for one in left if one.group == group]
                here = tier.connector.held(group, [one.block_hash for one in own])
                taken = [one for one, held in zip(own, here, strict=True) if held]
                tier.loads += taken
                tier.under_way += len(taken)
                self._of |= {one.block: (number, one, now) for one in taken}
                rest += [one for one, held in zip(own, here, strict=True) if not held]
            left = rest
        return left

    def _save(self, number: int, blocks: Sequence[CacheBlock]) -> None:
        """Have a tier save blocks of the pool, and those below it that do not hear what it gives up."""
        for tier in self._tiers[number:]:
            tier.saves += blocks
            if tier.capabilities.spills.support:
                return

    def _set_aside(self, tier: Tier, one: CacheBlock) -> CacheBlock:
        """Copy a block that loads are about to write, and that a lower tier has still to save."""
        row = torch.empty(self._sizes[one.group], dtype=torch.uint8)
        self._saves.begin_to_host(one.group, [one.block], [row])
        self._saves.wait_for({row.data_ptr()})
        tier.copy.rows.append(row)
        return CacheBlock(one.group, one.block_hash, tier.copy.first + len(tier.copy.rows) - 1)

    def _spilled(self, number: int, blocks: Sequence[EvictedBlock]) -> None:
        """Have a tier take blocks that the one above gives up, and those below that do not hear of it otherwise."""
        self._saves.wait_for({one.row.data_ptr() for one in blocks})
        for tier in self._tiers[number:]:
            for one in blocks:
                tier.take(one)
            if tier.capabilities.spills.support:
                return

    def _go_on(self) -> None:
        """Begin more of the loads that steps begin by parts."""
        pace, tiers = self._pace, [one for one in self._tiers if one.loads]
        if pace is None:
            for tier in tiers:
                self._start(tier, DEVICE_BYTES)
            return
        pace.begin(next((began for _, _, began in self._of.values()), None))
        for tier in tiers:
            if not pace.beside:
                self._start(tier, HOST_BYTES)
            while pace.beside and tier.loads and pace.is_left:
                self._start(tier, 1)
        pace.end()

    def _start(self, tier: Tier, most: int) -> None:
        """Start what a tier has to do. Tiers above have been started: what they give up is known.

        Args:
            most: bytes of its loads, where a step begins a part of them.
        """
        saves, tier.saves = tier.saves, []
        loads = self._part(tier, most)
        if not saves and not loads:
            return
        if loads:
            tier.speed.begin()
        try:
            tier.connector.start(saves, loads)
            if loads and not tier.asynchronous:
                tier.connector.wait()
                tier.coming.append((tier.copy.begun if tier.copy.beside else [self._copies.after()], loads))
        except Exception:  # a plugin's code may raise anything
            logger.exception("tier %s cannot save %d blocks and load %d", tier.name, len(saves), len(loads))
            self._failed |= {one.block for one in loads}
            while not all(done() for done in tier.copy.begun):  # the blocks get other owners
                time.sleep(0.001)
        finally:
            tier.copy.rows.clear()
            tier.copy.begun = []

    def _part(self, tier: Tier, most: int) -> list[CacheBlock]:
        """Take the loads that a step begins, of those that the tier has to do.

        To begin copies takes the host's time, which the step lasts longer by. An asynchronous tier sees to that itself,
        and one that copies in the order of the stream must copy all in the step that asks for them.
        """
        count = len(tier.loads)
        if tier.copy.beside:
            sizes = accumulate(self._sizes[one.group] for one in tier.loads)
            count = min(count, 1 + sum(size < most for size in sizes)) if most else 0
        loads, tier.loads = tier.loads[:count], tier.loads[count:]
        return loads

    def _arrived_of(self, number: int, tier: Tier) -> set[int]:
        """Return the blocks that have arrived from a tier."""
        if tier.asynchronous:
            arrived = set(cast("AsyncKVConnector", tier.connector).arrived()) & self._of.keys()
        else:
            arrived = self._ended(tier)
        blocks = [self._forget(block) for block in sorted(arrived)]
        counts = Counter(one.group for one in blocks)
        tokens = max((count * self._tokens[group] for group, count in counts.items()), default=0)
        tier.speed.count(tokens, more=bool(tier.under_way))
        if blocks and number and self._promote:
            self._promoted += len(blocks)
            self._save(0, blocks)
            for one in self._tiers:
                if one.saves:  # those of a tier above it, too
                    self._start(one, 0)
                    one.connector.wait()
        return arrived

    def _forget(self, block: int) -> CacheBlock:
        """Take note of a load that has ended. Return what was loaded."""
        number, one, _ = self._of.pop(block)
        self._tiers[number].under_way -= 1
        return one

    def _ended(self, tier: Tier) -> set[int]:
        """Return the blocks of a connector that loads in the step, whose copies are complete."""
        left, ended = list[tuple[list[Done], list[CacheBlock]]](), set[int]()
        for begun, loads in tier.coming:
            if all(done() for done in begun):
                ended |= {one.block for one in loads}
            else:
                left.append((begun, loads))
        tier.coming = left
        self._failed |= set(tier.connector.failed()) & self._of.keys()
        return ended - self._failed


class WatchedCopies:
    """Copies that know which rows they are still writing. Implements `BlockCopyBeside`.

    Args:
        copies: that are watched.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._saving: deque[tuple[Done, set[int]]] = deque()  # with the addresses of rows
        self.to_device, self.begin_to_device = copies.to_device, copies.begin_to_device

    def to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """See `BlockCopy`."""
        self.begin_to_host(group, blocks, rows)

    def begin_to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Done:
        """See `BlockCopyBeside`."""
        done = self._copies.begin_to_host(group, blocks, rows)
        self._forget()
        if not done():
            self._saving.append((done, {row.data_ptr() for row in rows}))
        return done

    def wait_for(self, addresses: Collection[int]) -> None:
        """Wait until the rows at these addresses are written."""
        self._forget()
        for done, own in self._saving:
            while not own.isdisjoint(addresses) and not done():
                time.sleep(0.0001)

    def _forget(self) -> None:
        """Forget copies that are over."""
        while self._saving and self._saving[0][0]():
            self._saving.popleft()
