"""Blocks and states that stay as they are while a save reads them, by references that the extension holds."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from slotline.core.kv_cache.block_pool import BlockPool
from slotline.plugins.kv_transfer.state_blocks import StateBlocks
from slotline.registry.contracts import CacheBlock


@frozen
class PoolPins:
    """References of blocks of the pool, and holds of states. Implements `Pins`.

    Attributes:
        pool: the blocks.
        states: the states, if the connector takes any.
    """

    pool: BlockPool
    states: StateBlocks | None

    def is_there(self, block: CacheBlock) -> bool:
        """Return whether a block is still found by its hash: one that was given to another request is not."""
        if self.states is not None and block.group == self.states.group:
            return self.states.is_kept(block)
        return self.pool.lookup(block.group, block.block_hash) == block.block

    def keep(self, blocks: Sequence[CacheBlock]) -> None:
        """Take a reference of each block."""
        for one in blocks:
            if self.states is not None and one.group == self.states.group:
                self.states.hold(one)
            else:
                self.pool.share([one.block])

    def let_go(self, blocks: Sequence[CacheBlock]) -> None:
        """Give the references back."""
        for one in blocks:
            if self.states is not None and one.group == self.states.group:
                self.states.let_go(one)
            else:
                self.pool.release([one.block])
