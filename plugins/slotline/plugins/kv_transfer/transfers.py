"""Transfers of blocks to and from a KV connector: saves and loads of a step, and failed loads.

Any exception of the connector is logged and costs only cache hits: a block that it should have loaded counts as
failed, and a block that it should have saved is not saved.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from attrs import define, field

from slotline.core.kv_cache.block_pool import NULL_BLOCK
from slotline.registry.contracts import BlockHash, CacheBlock, KVConnector

logger = logging.getLogger("slotline")


@define(eq=False)
class Transfers:
    """Queue of transfers: the cache manager adds loads and saves, the engine starts them.

    Attributes:
        connector: the plan's connector.
        saves_evicted: save blocks when the pool evicts them, instead of when they are full.
        name: the plugin's name and package, for the log.
    """

    connector: KVConnector
    saves_evicted: bool
    name: str = "the KV connector"
    _saves: list[CacheBlock] = field(factory=list, init=False)
    _loads: list[CacheBlock] = field(factory=list, init=False)
    _unsure: dict[int, CacheBlock] = field(factory=dict, init=False)  # by block: requested, and not known to be loaded
    _failed: set[int] = field(factory=set, init=False)

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Collection[BlockHash]:
        """Return the hashes whose block could be loaded."""
        if not hashes:
            return ()
        try:
            found = self.connector.held(group, list(hashes))
            return {one for one, here in zip(hashes, found, strict=True) if here}
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot say what it holds", self.name)
            return ()

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
                self.connector.start(list(saves), list(loads))  # copies, since the connector may change its lists
            except Exception:  # a plugin's code may raise anything
                logger.exception("%s cannot save %d blocks and load %d", self.name, len(saves), len(loads))
                self._failed |= {one.block for one in loads}
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
        try:
            self._failed |= set(self.connector.failed())
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s cannot say what has failed", self.name)
            self._failed |= set(self._unsure)
        lost = [one for block, one in self._unsure.items() if block in self._failed]
        self._failed.clear()
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
