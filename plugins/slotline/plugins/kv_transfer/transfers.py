"""Transfers of blocks to and from a KV connector: saves and loads of a step, and failed loads.

Any exception of the connector is logged and costs only cache hits: a block that it should have loaded counts as
failed, and a block that it should have saved is not saved.

All ranks call the methods alike, with the same blocks. Where they could differ they agree, outside of what is caught.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

from attrs import define, field

from slotline.core.kv_cache.block_pool import NULL_BLOCK
from slotline.plugins.kv_transfer.agreement import Agreement
from slotline.registry.contracts import AsyncKVConnector, BlockHash, CacheBlock, KVConnector, RequestKVConnector
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

logger = logging.getLogger("slotline")


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
    """

    connector: KVConnector
    saves_evicted: bool
    name: str = "the KV connector"
    elsewhere: frozenset[int] = frozenset()
    agreement: Agreement = field(factory=Agreement)
    by_request: bool = False
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
        held = self.agreement.held(self._held(group, hashes, params))
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

    def start(self) -> tuple[CacheBlock, ...]:
        """Start the transfers of the next forward pass. Return the started loads, to be passed to `settle` after it."""
        saves, self._saves = self._saves, []
        loads, self._loads = [one for one in self._loads if self._unsure.get(one.block) is one], []
        if saves or loads:
            try:
                self.connector.start(self._here(saves), self._here(loads))
            except Exception:  # a plugin's code may raise anything
                logger.exception("%s cannot save %d blocks and load %d", self.name, len(saves), len(loads))
                self._failed |= {one.block for one in loads}
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

    def settle(self, loads: Sequence[CacheBlock]) -> list[CacheBlock]:
        """Return the loads known to have failed, of `loads` and of later ones, after the step that read `loads`."""
        if not self._unsure:
            return []
        failed = self.agreement.failed(self._failures())
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
    """Queue of transfers of a connector whose loads end in later steps."""

    _arrived: set[int] = field(factory=set, init=False)

    @property
    def _connector(self) -> AsyncKVConnector:
        return cast("AsyncKVConnector", self.connector)

    @property
    def coming(self) -> Mapping[int, CacheBlock]:
        """Return the loads that are not known to have ended, by block."""
        return self._unsure

    def poll(self) -> tuple[list[CacheBlock], list[CacheBlock]]:
        """Return the loads that have ended on all ranks since the last call, and those of them that have failed."""
        try:
            self._arrived |= set(self._connector.arrived())
            self._failed |= set(self.connector.failed())
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot say what has arrived", self.name)
            self._discard()
            self._failed |= self._unsure.keys()
        done = [
            b in self._arrived or b in self._failed or one.group in self.elsewhere for b, one in self._unsure.items()
        ]
        ended, failed = self.agreement.ended(done, [block in self._failed for block in self._unsure])
        all_of = list(self._unsure.values())
        over = [one for one, flag in zip(all_of, ended, strict=True) if flag]
        for one in over:
            del self._unsure[one.block]
        self._arrived &= self._unsure.keys()
        self._failed &= self._unsure.keys()
        return over, [one for one, flag in zip(all_of, failed, strict=True) if flag]

    def finish(self) -> None:
        """Wait until no load is under way."""
        try:
            self._connector.finish()
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot finish its loads", self.name)
            self._failed |= self._unsure.keys()

    def give_up(self) -> list[CacheBlock]:
        """Wait for all loads and forget them. Return them."""
        self._discard()
        self._arrived.clear()
        return super().give_up()

    def _discard(self) -> None:
        """Wait until no load is under way, and have the connector forget which have ended."""
        self.finish()
        for ended in (self._connector.arrived, self._connector.failed):
            try:
                ended()
            except Exception:  # a plugin's code may raise anything
                logger.exception("%s cannot say what has ended", self.name)
