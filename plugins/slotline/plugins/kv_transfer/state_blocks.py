"""Checkpoints of states as blocks of a connector: the last group, whose numbers go on after those of the pool."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from slotline.core.batch.request import Request
from slotline.plugins.kv_transfer.transfers import AsyncTransfers
from slotline.plugins.states.checkpoints import Checkpoints
from slotline.plugins.states.dispatcher import StateDispatcher
from slotline.registry.contracts import BlockHash, CacheBlock, ConnectorGroup


class FindBlocks(Protocol):
    """Look-up of blocks that can be loaded, as `FeatureExtension.find_blocks`."""

    def __call__(self, request: Request, group: int, hashes: Sequence[BlockHash]) -> Collection[BlockHash]: ...


def state_group(dispatcher: StateDispatcher, unit: int, specs: Sequence[str]) -> ConnectorGroup:
    """Return the group of the states of all layers, one block for each checkpoint.

    Args:
        dispatcher: holds the states.
        unit: tokens between two prefixes that may have one.
        specs: the cache specs that lay out their memory.
    """
    return ConnectorGroup(
        name="states",
        layers=(),
        states=tuple(layer for group in dispatcher.groups for layer in group.layers),
        kv_dtype="uint8",
        layout=", ".join(specs),
        block_size=unit,
        kernel_block_size=unit,
        block_bytes=sum(one.shape[1] for one in dispatcher.pages.values()),
    )


def state_pages(dispatcher: StateDispatcher, num_rows: int) -> list[torch.Tensor]:
    """Return the memory of the checkpoints of each layer, [num_checkpoints, 1, page bytes] uint8."""
    layers = (layer for group in dispatcher.groups for layer in group.layers)
    return [dispatcher.pages[layer.index][num_rows:].unsqueeze(1) for layer in layers]


class StateBlocks:
    """States that a connector keeps. Implements `StateStore`.

    Args:
        checkpoints: the slots.
        transfers: of the connector.
        find: looks up blocks, of any group.
        group: index of the group.
        num_blocks: of the pool.
    """

    def __init__(
        self, checkpoints: Checkpoints, transfers: AsyncTransfers, find: FindBlocks, group: int, num_blocks: int
    ) -> None:
        self.group = group
        self._checkpoints, self._transfers, self._find = checkpoints, transfers, find
        self._offset = num_blocks - checkpoints.rows.max_requests
        checkpoints.store = self

    def find_states(self, request: Request, hashes: Sequence[BlockHash]) -> Collection[BlockHash]:
        """Return those of `hashes` whose state can be loaded for a request."""
        return self._find(request, self.group, hashes)

    def load_state(self, slot: int, block_hash: BlockHash) -> None:
        """Load a state into a slot."""
        self._transfers.want(CacheBlock(self.group, block_hash, slot + self._offset))

    def state_kept(self, slot: int, block_hash: BlockHash) -> None:
        """Save a state that has been kept."""
        self._transfers.kept(CacheBlock(self.group, block_hash, slot + self._offset))

    def awaited(self, row: int) -> int | None:
        """Return the number of the block that a row's state is loaded into, if it waits for one."""
        slot = self._checkpoints.awaited(row)
        return None if slot is None else slot + self._offset

    def is_coming(self, block_hash: BlockHash) -> bool:
        """Return whether the state behind a prefix is still to come."""
        return self._checkpoints.is_coming(block_hash)

    def drop(self, blocks: Sequence[CacheBlock]) -> list[int]:
        """Forget states whose load failed or takes too long. Return the rows that waited for any."""
        own = (one for one in blocks if one.group == self.group)
        return [row for one in own for row in self._checkpoints.drop(one.block - self._offset, one.block_hash)]

    def ended(self, blocks: Sequence[CacheBlock]) -> None:
        """Take note that nobody writes some blocks any more, and give rows the states that have arrived."""
        for one in blocks:
            if one.group == self.group:
                self._checkpoints.loaded(one.block - self._offset, one.block_hash)

    def is_kept(self, block: CacheBlock) -> bool:
        """Return whether a slot still has the state that it is to be saved for."""
        return self._checkpoints.slot_of(block.block_hash) == block.block - self._offset

    def is_there(self, block: CacheBlock) -> bool:
        """Return whether a block is none of a state, or its slot still has the state."""
        return block.group != self.group or self.is_kept(block)

    def hold(self, block: CacheBlock) -> None:
        """Keep a state as it is."""
        self._checkpoints.hold(block.block - self._offset)

    def let_go(self, block: CacheBlock) -> None:
        """Let a state be overwritten."""
        self._checkpoints.let_go(block.block - self._offset, block.block_hash)

    def give_up(self) -> None:
        """Forget all states that were on their way."""
        self._checkpoints.give_up()
