"""Blocks in host memory, found by their hash, with eviction of the least recently used.

A block stays here when it goes back to the pool, so that evicting it from the pool again copies nothing. All copies run
in the order of the device's current stream, like the forward passes. The host never waits, and no copy is overtaken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import torch

from slotline.registry.config import size_in_bytes
from slotline.registry.contracts.kv_connector import CacheBlock, KVConnectorContext
from slotline.registry.contracts.kv_spec import BlockHash
from slotline.registry.errors import CapacityError

Key = tuple[int, BlockHash]


class HostMemory:
    """A second, larger prefix cache. Implements `KVConnector`.

    Raises CapacityError if the memory does not hold one block, or cannot be had.
    """

    def __init__(self, context: KVConnectorContext) -> None:
        self._groups, self._copy = context.groups, context.copy
        size, asked = max(group.block_bytes for group in context.groups), context.options.memory
        count = size_in_bytes(asked) // size
        where = f"kv_connector.host_memory.memory = {asked!r}"
        if count < 1:
            raise CapacityError(
                f"{where} holds no block: one takes {size} bytes", fix=f"set it to '{-(-size // 1024)}KiB' at least"
            )
        try:
            self._rows = torch.empty((count, size), dtype=torch.uint8, pin_memory=context.device.startswith("cuda"))
        except RuntimeError as error:
            raise CapacityError(f"{where} cannot be had: {error}", fix="lower it") from error
        self._free = list(range(count - 1, -1, -1))
        self._row_of: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._failed: set[int] = set()

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [(group, block_hash) in self._row_of for block_hash in hashes]

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        wanted = {_key(one) for one in loads}
        for one in reversed(loads):  # prefixes begin with the first, which is of use to the most
            if _key(one) in self._row_of:
                self._row_of.move_to_end(_key(one))
        fresh: list[CacheBlock] = []
        for one in saves:
            if _key(one) in self._row_of:
                self._row_of.move_to_end(_key(one))
            elif self._make_room(wanted):
                self._row_of[_key(one)] = self._free.pop()
                fresh.append(one)
        found = [one for one in loads if _key(one) in self._row_of]
        self._failed |= {one.block for one in loads} - {one.block for one in found}
        self._run(self._copy.to_host, [one for one in fresh if _key(one) in self._row_of])
        self._run(self._copy.to_device, found)

    def wait(self) -> None:
        """Do nothing, because the forward pass follows the copies in the stream."""

    def failed(self) -> Collection[int]:
        failed, self._failed = self._failed, set()
        return failed

    def reset(self) -> None:
        self._free += self._row_of.values()
        self._row_of.clear()

    def _make_room(self, wanted: Collection[Key]) -> bool:
        """Return True if a row is free, after dropping the least recently used block unless it is `wanted`."""
        if not self._free:
            oldest = next(iter(self._row_of))
            if oldest in wanted:
                return False
            self._free.append(self._row_of.pop(oldest))
        return True

    def _run(
        self, copy: Callable[[int, Sequence[int], Sequence[torch.Tensor]], None], blocks: Sequence[CacheBlock]
    ) -> None:
        """Copy blocks from or to their rows."""
        for index, group in enumerate(self._groups):
            own = [one for one in blocks if one.group == index]
            if own:
                rows = [self._rows[self._row_of[_key(one)], : group.block_bytes] for one in own]
                copy(index, [one.block for one in own], rows)


def _key(block: CacheBlock) -> Key:
    return block.group, block.block_hash
