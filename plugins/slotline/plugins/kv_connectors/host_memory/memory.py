"""Blocks in host memory, found by their hash. A policy says which make way for others.

A block stays here when it goes back to the pool, so that evicting it from the pool again copies nothing. All copies run
in the order of the device's current stream, like the forward passes. The host never waits, and no copy is overtaken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from slotline.plugins.kv_connectors.stores.block_store import Key
from slotline.plugins.kv_connectors.stores.eviction import policy_of
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts.kv_connector import CacheBlock, EvictedBlock, KVConnectorContext
from slotline.registry.contracts.kv_spec import BlockHash
from slotline.registry.errors import CapacityError


class HostMemory:
    """A second, larger prefix cache. Implements `CountingKVConnector`.

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
        self._row_of: dict[Key, int] = {}
        self._order = policy_of(context.options.policy, "kv_connector.host_memory.policy")
        self._evicted = context.evicted
        self._counts = {"saved": 0, "loaded": 0, "evicted": 0, "skipped_room": 0}
        self._failed: set[int] = set()

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [Key(group, block_hash) in self._row_of for block_hash in hashes]

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        for one in reversed(loads):  # prefixes begin with the first, which is of use to the most
            if _key(one) in self._row_of:
                self._order.use(_key(one))
        fresh = {_key(one): one for one in saves}
        for key in [key for key in fresh if key in self._row_of]:
            self._order.use(key)
            del fresh[key]
        self._make_room(len(fresh), {_key(one) for one in loads})
        for key in list(fresh)[len(self._free) :]:
            self._counts["skipped_room"] += 1
            del fresh[key]
        for key in fresh:
            self._row_of[key] = self._free.pop()
            self._order.add(key)
        found = [one for one in loads if _key(one) in self._row_of]
        self._failed |= {one.block for one in loads} - {one.block for one in found}
        self._counts["saved"] += len(fresh)
        self._counts["loaded"] += len(found)
        self._run(self._copy.to_host, list(fresh.values()))
        self._run(self._copy.to_device, found)

    def wait(self) -> None:
        """Do nothing, because the forward pass follows the copies in the stream."""

    def failed(self) -> Collection[int]:
        failed, self._failed = self._failed, set()
        return failed

    def counts(self) -> Mapping[str, float]:
        return dict(self._counts)

    def reset(self) -> None:
        for key in self._row_of:
            self._order.remove(key)
        self._free += self._row_of.values()
        self._row_of.clear()

    def _make_room(self, count: int, wanted: Collection[Key]) -> None:
        """Give up blocks that are not `wanted` until `count` rows are free, or as many as can be."""
        gone = list[Key]()
        if (missing := count - len(self._free)) > 0:
            for key in self._order.victims():
                if key not in wanted:
                    gone.append(key)
                if len(gone) == missing:
                    break
        rows = {key: self._row_of.pop(key) for key in gone}
        for key in gone:
            self._order.remove(key)
        self._free += rows.values()
        self._counts["evicted"] += len(rows)
        if rows and self._evicted is not None:
            sizes = [group.block_bytes for group in self._groups]
            self._evicted([EvictedBlock(*key, self._rows[row, : sizes[key.group]]) for key, row in rows.items()])

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
    return Key(block.group, block.block_hash)
