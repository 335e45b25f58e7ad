"""Blocks in host memory, found by their hash. A policy says which make way for others.

States are much larger than blocks, so they have half of the memory for themselves.

A block stays here when it goes back to the pool, so that evicting it from the pool again copies nothing. All copies run
in the order of the device's current stream, like the forward passes. The host never waits, and no copy is overtaken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch

from slotline.plugins.kv_connectors.stores.block_store import Key
from slotline.plugins.kv_connectors.stores.eviction import EvictionPolicy, policy_of
from slotline.plugins.kv_connectors.stores.size_classes import class_of, size_classes
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts.kv_connector import CacheBlock, EvictedBlock, KVConnectorContext
from slotline.registry.contracts.kv_spec import BlockHash
from slotline.registry.errors import CapacityError


class _Rows:
    """Rows of one size, found by the name of the block in each.

    Args:
        rows: [count, size] uint8.
        order: says which block makes way.

    Attributes:
        order: as given.
        row_of: the rows of blocks.
        free: the numbers of the others.
    """

    def __init__(self, rows: torch.Tensor, order: EvictionPolicy) -> None:
        self._rows, self.order = rows, order
        self.row_of: dict[Key, int] = {}
        self.free = list(range(len(rows) - 1, -1, -1))

    def row(self, key: Key, size: int) -> torch.Tensor:
        """Return the first `size` bytes of a block's row."""
        return self._rows[self.row_of[key], :size]

    def victims(self, count: int, wanted: Collection[Key]) -> list[Key]:
        """Return blocks that are not `wanted` and make way for `count` others, or for as many as can be."""
        gone = list[Key]()
        if (missing := count - len(self.free)) > 0:
            for key in self.order.victims():
                if key not in wanted:
                    gone.append(key)
                if len(gone) == missing:
                    break
        return gone

    def give_up(self, keys: Sequence[Key]) -> None:
        """Forget blocks."""
        for key in keys:
            self.free.append(self.row_of.pop(key))
            self.order.remove(key)


class HostMemory:
    """A second, larger prefix cache. Implements `CountingKVConnector`.

    Raises CapacityError if the memory does not hold one block, or cannot be had.
    """

    def __init__(self, context: KVConnectorContext) -> None:
        self._groups, self._copy = context.groups, context.copy
        classes, asked = size_classes(context.groups), context.options.memory
        where, pinned = f"kv_connector.host_memory.memory = {asked!r}", context.device.startswith("cuda")
        sizes = [max(context.groups[group].block_bytes for group in own) for own in classes]
        counts = [size_in_bytes(asked) // len(sizes) // size for size in sizes]
        if min(counts) < 1:
            what = "block" if len(sizes) == 1 else "state in the half that is for states"
            raise CapacityError(
                f"{where} holds no {what}: one takes {max(sizes)} bytes",
                fix=f"set it to '{-(-max(sizes) * len(sizes) // 1024)}KiB' at least",
            )
        try:
            memory = [
                torch.empty(shape, dtype=torch.uint8, pin_memory=pinned) for shape in zip(counts, sizes, strict=True)
            ]
        except RuntimeError as error:
            raise CapacityError(f"{where} cannot be had: {error}", fix="lower it") from error
        policy = partial(policy_of, context.options.policy, "kv_connector.host_memory.policy")
        self._all = [_Rows(rows, policy()) for rows in memory]
        self._rows_of = {group: self._all[number] for group, number in class_of(classes).items()}
        self._evicted = context.evicted
        self._counts = {"saved": 0, "loaded": 0, "evicted": 0, "skipped_room": 0}
        self._failed: set[int] = set()

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [Key(group, block_hash) in self._rows_of[group].row_of for block_hash in hashes]

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        found = [one for one in loads if _key(one) in self._rows_of[one.group].row_of]
        for one in reversed(found):  # prefixes begin with the first, which is of use to the most
            self._rows_of[one.group].order.use(_key(one))
        wanted, kept = {_key(one) for one in loads}, list[CacheBlock]()
        for rows in self._all:
            kept += self._take(rows, [one for one in saves if self._rows_of[one.group] is rows], wanted)
        self._failed |= {one.block for one in loads} - {one.block for one in found}
        self._counts["saved"] += len(kept)
        self._counts["loaded"] += len(found)
        self._run(self._copy.to_host, kept)
        self._run(self._copy.to_device, found)

    def wait(self) -> None:
        """Do nothing, because the forward pass follows the copies in the stream."""

    def failed(self) -> Collection[int]:
        failed, self._failed = self._failed, set()
        return failed

    def counts(self) -> Mapping[str, float]:
        return dict(self._counts)

    def reset(self) -> None:
        for rows in self._all:
            rows.give_up(list(rows.row_of))

    def _take(self, rows: _Rows, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> list[CacheBlock]:
        """Give rows to blocks that have none. Return those that are to be copied, which are as many as have room."""
        fresh = {_key(one): one for one in saves}
        for key in [key for key in fresh if key in rows.row_of]:
            rows.order.use(key)
            del fresh[key]
        gone = rows.victims(len(fresh), wanted)
        if gone and self._evicted is not None:
            sizes = [group.block_bytes for group in self._groups]
            self._evicted([EvictedBlock(*key, rows.row(key, sizes[key.group])) for key in gone])
        rows.give_up(gone)
        self._counts["evicted"] += len(gone)
        for key in list(fresh)[len(rows.free) :]:
            self._counts["skipped_room"] += 1
            del fresh[key]
        for key in fresh:
            rows.row_of[key] = rows.free.pop()
            rows.order.add(key)
        return list(fresh.values())

    def _run(
        self, copy: Callable[[int, Sequence[int], Sequence[torch.Tensor]], None], blocks: Sequence[CacheBlock]
    ) -> None:
        """Copy blocks from or to their rows."""
        for index, group in enumerate(self._groups):
            own = [one for one in blocks if one.group == index]
            if own:
                rows = [self._rows_of[index].row(_key(one), group.block_bytes) for one in own]
                copy(index, [one.block for one in own], rows)


def _key(block: CacheBlock) -> Key:
    return Key(block.group, block.block_hash)
