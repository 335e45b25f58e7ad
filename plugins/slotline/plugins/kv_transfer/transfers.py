"""Transfers of blocks to and from a KV connector: saves and loads of a step, and failed loads.

Any exception of the connector is logged and costs only cache hits: a block that it should have loaded counts as
failed, and a block that it should have saved is not saved.

All ranks call the methods alike, with the same blocks. Where they could differ they agree, outside of what is caught.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, cast

from attrs import define, field

from slotline.core.kv_cache.block_pool import NULL_BLOCK
from slotline.plugins.kv_transfer.agreement import Agreement
from slotline.plugins.kv_transfer.speed import LoadSpeed
from slotline.registry.contracts import (
    AsyncKVConnector,
    BlockHash,
    CacheBlock,
    CountingKVConnector,
    KVConnector,
    LastingKVConnector,
    RequestKVConnector,
)
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

logger = logging.getLogger("slotline")


class Ended(NamedTuple):
    """Loads whose end was not known before.

    Attributes:
        done: those that have ended, in time.
        lost: those of them that failed.
        late: those that took too long. The connector may still write their blocks.
        free: late ones that have ended now.
    """

    done: list[CacheBlock]
    lost: list[CacheBlock]
    late: list[CacheBlock]
    free: list[CacheBlock]


class Pins(Protocol):
    """Blocks that stay as they are while the connector reads them."""

    def is_there(self, block: CacheBlock) -> bool:
        """Return whether a block still holds what it is to be saved for."""
        ...

    def keep(self, blocks: Sequence[CacheBlock]) -> None:
        """Keep blocks as they are."""
        ...

    def let_go(self, blocks: Sequence[CacheBlock]) -> None:
        """Let blocks be overwritten."""
        ...


@define(eq=False)
class Transfers:
    """Queue of transfers: the cache manager adds loads and saves, the engine starts them.

    Attributes:
        connector: the plan's connector.
        saves_evicted: save blocks when the pool evicts them, instead of when they are full.
        name: the plugin's name and package, for the log.
        elsewhere: groups whose layers other ranks have. The connector does not see their blocks.
        agreement: with the other ranks.
        by_request: whether the connector finds blocks by what a request says of them.
        speed: of the connector, beside that of computing.
        sizes: tokens of a block, by group.
        counts: whether the connector counts its events.
        late: loads that took too long.
    """

    connector: KVConnector
    saves_evicted: bool
    name: str = "the KV connector"
    elsewhere: frozenset[int] = frozenset()
    agreement: Agreement = field(factory=Agreement)
    by_request: bool = False
    speed: LoadSpeed = field(factory=lambda: LoadSpeed(active=False))
    sizes: Sequence[int] = ()
    counts: bool = False
    late: int = field(default=0, init=False)
    _saves: list[CacheBlock] = field(factory=list, init=False)
    _loads: list[CacheBlock] = field(factory=list, init=False)
    _unsure: dict[int, CacheBlock] = field(factory=dict, init=False)  # by block: requested, and not known to be loaded
    _failed: set[int] = field(factory=set, init=False)

    def check(self, params: Any) -> None:
        """Check what a request says of its blocks.

        Raises:
            RequestError: if it is no mapping, or the connector does not read it.
        """
        if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
            raise RequestError(
                f"kv_transfer_params={safe_repr(params)} are no parameters by name",
                fix="give those of the answer of the engine that has computed the prompt",
            )
        if not self.by_request:
            raise RequestError(
                f"kv_transfer_params: {self.name} does not read them",
                fix="leave them out, or set kv_connector.name to one that declares by_request, such as 'handoff'",
            )

    def answer(self, params: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what another engine needs to continue a request with these parameters."""
        try:
            return cast("RequestKVConnector", self.connector).answer(params) if self.by_request else None
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s has no answer to kv_transfer_params", self.name)
            return None

    def held(
        self, group: int, hashes: Sequence[BlockHash], params: Mapping[str, Any] | None = None
    ) -> Collection[BlockHash]:
        """Return the hashes whose block could be loaded, for a request with these parameters."""
        if not hashes:
            return ()
        held = self.agreement.held(self._held(group, hashes, params), self.events)
        return {one for one, here in zip(hashes, held, strict=True) if here}

    def want(self, block: CacheBlock) -> None:
        """Load a block before the next forward pass."""
        self._loads.append(block)
        self._unsure[block.block] = block

    def evicted(self, block: CacheBlock) -> None:
        """Handle a block that the pool is about to reuse. A block that was still to be loaded is not loaded then."""
        if self._unsure.pop(block.block, None) is None and self.saves_evicted:
            self._saves.append(block)

    def filled(self, group: int, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Handle blocks that became full."""
        if not self.saves_evicted:
            pairs = zip(blocks, hashes, strict=True)
            self._saves += [CacheBlock(group, one, block) for block, one in pairs if block != NULL_BLOCK]

    def kept(self, state: CacheBlock) -> None:
        """Save a state that has been kept, whenever the connector takes blocks."""
        self._saves.append(state)

    def start(self) -> tuple[CacheBlock, ...]:
        """Start the transfers of the next forward pass. Return the started loads, to be passed to `settle` after it."""
        saves, self._saves = self._saves, []
        loads, self._loads = [one for one in self._loads if self._unsure.get(one.block) is one], []
        if saves or loads:
            begun = time.perf_counter()
            try:
                self.connector.start(self._here(saves), self._here(loads))
            except Exception:  # a plugin's code may raise anything
                logger.exception("%s cannot save %d blocks and load %d", self.name, len(saves), len(loads))
                self._not_started(saves, loads)
            self._started(loads, time.perf_counter() - begun)
        self.agreement.count_loads(len(loads))
        return tuple(loads)

    def save_filled(self) -> None:
        """Start saving full blocks without waiting for another step."""
        if not self.saves_evicted and self._saves and not self._loads:
            self.start()

    def wait(self, loads: Sequence[CacheBlock]) -> None:
        """Wait for `loads` before the forward pass that reads them."""
        try:
            self.connector.wait()
        except Exception:  # a plugin's code may raise anything
            logger.exception("waiting for %s failed", self.name)
            self._failed |= {one.block for one in loads}

    def lose(self, loads: Sequence[CacheBlock]) -> None:
        """Count loads as failed."""
        self._failed |= {one.block for one in loads}

    def settle(self, loads: Sequence[CacheBlock]) -> list[CacheBlock]:
        """Return the loads known to have failed, of `loads` and of later ones, after the step that read `loads`."""
        if not self._unsure:
            return []
        failed, slow = self.agreement.failed(self._failures(), slow=self.speed.is_slow)
        self._judge(slow=slow)
        lost = [one for one, bad in zip(self._unsure.values(), failed, strict=True) if bad]
        for one in (*loads, *lost):
            if self._unsure.get(one.block) is one:
                del self._unsure[one.block]
        return lost

    def give_up(self) -> list[CacheBlock]:
        """Forget all loads that are not known to have succeeded, and return them."""
        unsure = list(self._unsure.values())
        self._loads.clear()
        self._unsure.clear()
        self._failed.clear()
        return unsure

    def reset(self) -> None:
        """Forget all blocks, here and in the connector."""
        self._saves.clear()
        self._loads.clear()
        self._unsure.clear()
        self.connector.reset()

    def tokens_of(self, blocks: Sequence[CacheBlock]) -> int:
        """Return the tokens of blocks: of those of the group that has most."""
        counts = Counter[int]()
        for one in blocks:
            counts[one.group] += self.sizes[one.group] if self.sizes else 1
        return max(counts.values(), default=0)

    def events(self) -> Mapping[str, float]:
        """Return the number of each event so far, of the connector on this rank and of its limits."""
        speed = self.speed
        own = {"left_out": float(speed.left_out), "requests_left_out": float(speed.skipped)}
        return {**own, "late": float(self.late), **self._counted()}

    def _counted(self) -> Mapping[str, float]:
        """Return what the connector counts."""
        if not self.counts:
            return {}
        try:
            found = cast("CountingKVConnector", self.connector).counts()
            return {str(name): float(value) for name, value in found.items()}
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot say what it counts", self.name)
            return {}

    def _started(self, loads: Sequence[CacheBlock], seconds: float) -> None:
        """Take note of transfers that were started, which took this long."""
        if loads:
            self.speed.loading.add(seconds, self.tokens_of(loads))

    def _not_started(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        """Take note of transfers that the connector could not start."""
        self._failed |= {one.block for one in loads}

    def _judge(self, *, slow: bool) -> None:
        """Leave a slow store out. All ranks do it in the same step."""
        if slow:
            loads, computes = self.speed.loading.per_token, self.speed.computing.per_token
            self.speed.leave_out()
            logger.warning(
                "%s takes %.3f ms to load a token, and computing one takes %.3f ms: it is left out for %d requests",
                self.name,
                1e3 * loads,
                1e3 * computes,
                self.speed.requests_left,
            )

    def _held(self, group: int, hashes: Sequence[BlockHash], params: Mapping[str, Any] | None) -> list[bool]:
        """Return for each hash whether nothing is lacking here."""
        if group in self.elsewhere:
            return [True] * len(hashes)
        try:
            held = self.connector.held
            if params and self.by_request:
                held = partial(cast("RequestKVConnector", self.connector).held_for, params=params)
            found = [bool(one) for one in held(group, list(hashes))]
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot say what it holds", self.name)
            return [False] * len(hashes)
        if len(found) != len(hashes):
            logger.error("%s says of %d blocks whether it holds them, of %d", self.name, len(found), len(hashes))
            return [False] * len(hashes)
        return found

    def _failures(self) -> list[bool]:
        """Return for each load that is not known to have succeeded whether it is known to have failed here."""
        try:
            self._failed |= set(self.connector.failed())
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot say what has failed", self.name)
            self._failed |= set(self._unsure)
        failed, self._failed = self._failed, set()
        return [block in failed for block in self._unsure]

    def _here(self, blocks: Sequence[CacheBlock]) -> list[CacheBlock]:
        """Return a new list of the blocks that have a part here."""
        return [one for one in blocks if one.group not in self.elsewhere]


@define(eq=False)
class AsyncTransfers(Transfers):
    """Queue of transfers of a connector whose loads end in later steps.

    Attributes:
        timeout: seconds after which a request waits for a load no more.
        max_saves: blocks that may be read by saves at a time, if they last.
        pins: keep blocks as they are while a save reads them. None if saves end in their step.
        is_there: tells whether a block to be saved is still the one that was meant, where saves end in their step.
        unsaved: blocks that held something else, or the same as another block, when their save would have begun.
    """

    timeout: float = float("inf")
    max_saves: int = 0
    pins: Pins | None = None
    is_there: Callable[[CacheBlock], bool] | None = None
    unsaved: int = field(default=0, init=False)
    _saving: dict[int, CacheBlock] = field(factory=dict, init=False)  # by block
    _saved: set[int] = field(factory=set, init=False)
    _arrived: set[int] = field(factory=set, init=False)
    _begun: dict[int, float] = field(factory=dict, init=False)  # by block, when its load was started
    _late: dict[int, CacheBlock] = field(factory=dict, init=False)  # by block, loads that nobody waits for any more

    @property
    def _connector(self) -> AsyncKVConnector:
        return cast("AsyncKVConnector", self.connector)

    @property
    def coming(self) -> Mapping[int, CacheBlock]:
        """Return the loads that are not known to have ended, by block, without those that took too long."""
        return self._unsure

    @property
    def reserved(self) -> AbstractSet[int]:
        """Return the blocks that the connector may still write."""
        return self._unsure.keys() | self._late.keys() if self._late else self._unsure.keys()

    @property
    def saving(self) -> Mapping[int, CacheBlock]:
        """Return the saves under way, by block."""
        return self._saving

    def start(self) -> tuple[CacheBlock, ...]:
        """Start the transfers as before, and keep blocks as they are whose saves last."""
        if self.pins is not None:
            later = self._keep_saves(self.pins)
            started = super().start()
            self._saves = later
            return started
        if self.is_there is not None:
            there = [one for one in self._saves if self.is_there(one)]
            self.unsaved += len(self._saves) - len(there)
            self._saves = there
        return super().start()

    def _keep_saves(self, pins: Pins) -> list[CacheBlock]:
        """Keep the blocks of the next saves as they are. Return those for which too many saves are under way."""
        if len(self._saving) + len(self._saves) > self.max_saves:
            self.poll_saves()
        found = {one.block: one for one in self._saves if one.block not in self._saving}
        there = [one for one in found.values() if pins.is_there(one)]
        self.unsaved += len(found) - len(there)
        room = max(self.max_saves - len(self._saving), 0)
        self._saves, later = there[:room], there[room:]
        pins.keep(self._saves)
        self._saving |= {one.block: one for one in self._saves}
        return later

    def poll_saves(self) -> None:
        """Let go of the blocks whose saves have ended on all ranks."""
        if self.pins is None or not self._saving:
            return
        try:
            self._saved |= set(cast("LastingKVConnector", self.connector).saved())
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot say what is saved", self.name)
            self.finish()
            self._saved |= self._saving.keys()
        own = [one.block in self._saved or one.group in self.elsewhere for one in self._saving.values()]
        over = self.agreement.everywhere(own)
        ended = [one for one, is_over in zip(self._saving.values(), over, strict=True) if is_over]
        for one in ended:
            del self._saving[one.block]
        self._saved &= self._saving.keys()
        self.pins.let_go(ended)

    @property
    def is_late(self) -> bool:
        """Return whether a load is under way that took too long. The connector is not asked meanwhile."""
        return bool(self._late)

    def poll(self) -> Ended:
        """Return which loads have ended on all ranks since the last call, and which took too long."""
        try:
            self._arrived |= set(self._connector.arrived())
            self._failed |= set(self.connector.failed())
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot say what has arrived", self.name)
            self._discard()
            self._failed |= self.reserved
        found = self._agreed()
        if self._arrived or self._failed:
            self._arrived &= self.reserved
            self._failed &= self.reserved
        self.speed.loads_under_way(self.tokens_of(found.done), more=bool(self._unsure))
        return found

    def finish(self) -> None:
        """Wait until no load is under way."""
        try:
            self._connector.finish()
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot finish its loads", self.name)
            self._failed |= self.reserved

    def give_up(self) -> list[CacheBlock]:
        """Wait for all loads and forget them. Return them."""
        self._discard()
        self._arrived.clear()
        self._late.clear()
        self._begun.clear()
        self._saving.clear()
        self._saved.clear()
        self._saves.clear()
        return super().give_up()

    def events(self) -> Mapping[str, float]:
        """Return the number of each event so far."""
        waits = self.pins is not None or self.is_there is not None
        return {**super().events(), **({"unsaved": float(self.unsaved)} if waits else {})}

    def _agreed(self) -> Ended:
        """Return what all ranks know of the loads under way."""
        failed, oldest = self._failed, time.monotonic() - self.timeout
        every, found = self._noted(oldest), Ended([], [], [], [])
        if not every and self.agreement.size == 1 and not self.speed.is_slow:
            return found
        done = [b in self._arrived or b in failed or one.group in self.elsewhere for b, one in every.items()]
        late = [block in self._unsure and self._begun.get(block, oldest) < oldest for block in every]
        lost = [block in failed for block in every]
        ended, bad, overdue, slow = self.agreement.ended(done, lost, late, slow=self.speed.is_slow)
        self._judge(slow=slow)
        for one, is_over, is_bad, is_late in zip(every.values(), ended, bad, overdue, strict=True):
            if is_over:
                known = self._unsure.pop(one.block, None) is not None
                (found.done if known else found.free).append(one)
                self._late.pop(one.block, None)
                self._begun.pop(one.block, None)
                if is_bad and known:
                    found.lost.append(one)
            elif is_late:
                self._late[one.block] = self._unsure.pop(one.block)
                found.late.append(one)
        if found.late:
            self.late += len(found.late)
            text = "%s has not ended %d loads after %g s: they are computed, and it is not asked until they have ended"
            logger.warning(text, self.name, len(found.late), self.timeout)
        return found

    def _noted(self, oldest: float) -> dict[int, CacheBlock]:
        """Return the loads under way, by block: of a rank alone those that have ended or were started before `oldest`.

        Others change nothing then, and a step beside many loads would look at all of them.
        """
        every = {**self._unsure, **self._late} if self._late else self._unsure
        if self.agreement.size > 1 or self.elsewhere:
            return dict(every)
        blocks = [*(self._arrived | self._failed), *takewhile(lambda one: self._begun[one] < oldest, self._begun)]
        return {block: every[block] for block in blocks if block in every}

    def _not_started(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        """Take note of transfers that the connector could not start. Nothing reads the blocks of these saves."""
        super()._not_started(saves, loads)
        self._saved |= {one.block for one in saves}

    def _started(self, loads: Sequence[CacheBlock], seconds: float) -> None:
        """Take note of loads that were started."""
        now = time.monotonic()
        self._begun |= {one.block: now for one in loads}

    def _discard(self) -> None:
        """Wait until nothing is under way, and have the connector forget which have ended."""
        self.finish()
        lasting = () if self.pins is None else (cast("LastingKVConnector", self.connector).saved,)
        for ended in (self._connector.arrived, self._connector.failed, *lasting):
            try:
                ended()
            except Exception:  # a plugin's code may raise anything
                logger.exception("%s cannot say what has ended", self.name)
