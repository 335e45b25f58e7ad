"""Blocks on their way to and from a KV connector: what a step saves and loads, and which loads have failed.

Whatever the connector raises is logged and costs its hits: what it should have loaded counts as failed, what it should
have saved is lost to it.
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
    """Between the cache manager, which says what to load and to save, and the engine, which says when.

    Attributes:
        connector: of the plan.
        saves_evicted: whether blocks are saved when the pool gives them up, and not when they are full.
        name: of the plugin and who brings it, for the log.
    """

    connector: KVConnector
    saves_evicted: bool
    name: str = "the KV connector"
    _saves: list[CacheBlock] = field(factory=list, init=False)
    _loads: list[CacheBlock] = field(factory=list, init=False)
    _unsure: dict[int, CacheBlock] = field(factory=dict, init=False)  # by block: to be loaded, and not known to be good
    _failed: set[int] = field(factory=set, init=False)

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Collection[BlockHash]:
        """Those of `hashes` whose block could be loaded."""
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
        """The pool is about to use a block for something else. One that is still to be loaded is not, then."""
        if self._unsure.pop(block.block, None) is None and self.saves_evicted:
            self._saves.append(block)

    def filled(self, group: int, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Blocks have their last tokens."""
        if not self.saves_evicted:
            pairs = zip(blocks, hashes, strict=True)
            self._saves += [CacheBlock(group, one, block) for block, one in pairs if block != NULL_BLOCK]

    def start(self) -> tuple[CacheBlock, ...]:
        """Begin what the next forward pass needs; what was begun to load, to be handed to `settle` behind it."""
        saves, self._saves = self._saves, []
        loads, self._loads = [one for one in self._loads if self._unsure.get(one.block) is one], []
        if saves or loads:
            try:
                self.connector.start(list(saves), list(loads))  # what it does to its lists is its own
            except Exception:  # a plugin's code may raise anything
                logger.exception("%s cannot save %d blocks and load %d", self.name, len(saves), len(loads))
                self._failed |= {one.block for one in loads}
        return tuple(loads)

    def save_filled(self) -> None:
        """Begin to save what is full, without waiting for another step."""
        if not self.saves_evicted and self._saves and not self._loads:
            self.start()

    def wait(self, loads: Sequence[CacheBlock]) -> None:
        """Before the forward pass that reads `loads`."""
        try:
            self.connector.wait()
        except Exception:  # a plugin's code may raise anything
            logger.exception("waiting for %s failed", self.name)
            self._failed |= {one.block for one in loads}

    def settle(self, loads: Sequence[CacheBlock]) -> list[CacheBlock]:
        """The step that read `loads` is done: those loads, and later ones, that are known to have failed."""
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
        """Forget all loads that are not known to be good, and return them."""
        unsure = list(self._unsure.values())
        self._loads.clear()
        self._unsure.clear()
        self._failed.clear()
        return unsure

    def reset(self) -> None:
        """Forget everything, here and in the connector."""
        self._saves.clear()
        self._loads.clear()
        self._unsure.clear()
        self.connector.reset()
