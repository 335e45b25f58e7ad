"""A KV connector that keeps blocks compressed in host memory, each with a checksum."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import torch

from slotline.registry.contracts import BlockHash, CacheBlock, EvictedBlock, KVConnectorContext

Key = tuple[int, BlockHash]


class ZippedBlocks:
    """Blocks as they fill, the least recently used make way and are offered to whoever takes them."""

    def __init__(self, context: KVConnectorContext) -> None:
        self.context = context
        self.limit = context.options.kilobytes * 1000
        self.zipped: OrderedDict[Key, tuple[bytes, int]] = OrderedDict()  # with a checksum, least recently used first
        self.broken: set[int] = set()
        self.seen = {"saved": 0, "loaded": 0, "evicted": 0, "corrupt": 0}

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [(group, one) in self.zipped for one in hashes]

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        for one in saves:
            if (one.group, one.block_hash) not in self.zipped:
                data = self.row(one.group)
                self.context.copy.to_host(one.group, [one.block], [data])
                packed = zlib.compress(data.numpy().tobytes(), 1)
                self.zipped[one.group, one.block_hash] = packed, zlib.crc32(packed)
                self.seen["saved"] += 1
        for one in loads:
            found = self.unzipped((one.group, one.block_hash))
            if found is None:
                self.broken.add(one.block)
            else:
                self.zipped.move_to_end((one.group, one.block_hash))
                self.context.copy.to_device(one.group, [one.block], [found])
                self.seen["loaded"] += 1
        self.make_room()

    def wait(self) -> None:
        """All copies are complete."""

    def failed(self) -> Collection[int]:
        broken, self.broken = self.broken, set()
        return broken

    def reset(self) -> None:
        self.zipped.clear()

    def counts(self) -> Mapping[str, float]:
        return dict(self.seen)

    def row(self, group: int) -> torch.Tensor:
        return torch.empty(self.context.groups[group].block_bytes, dtype=torch.uint8)

    def unzipped(self, key: Key) -> torch.Tensor | None:
        """The bytes of a block, None if they are not there or not the ones that were saved."""
        packed, checksum = self.zipped.get(key, (b"", 1))
        if zlib.crc32(packed) != checksum:
            self.seen["corrupt"] += key in self.zipped
            self.zipped.pop(key, None)
            return None
        return torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)

    def make_room(self) -> None:
        while self.zipped and sum(len(packed) for packed, _ in self.zipped.values()) > self.limit:
            key = next(iter(self.zipped))
            row = self.unzipped(key)
            self.zipped.pop(key, None)
            self.seen["evicted"] += 1
            if row is not None and self.context.evicted is not None:
                self.context.evicted([EvictedBlock(*key, row)])
