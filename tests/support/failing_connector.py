"""A connector that keeps blocks in a dict when they are full, and fails in the way that its options name.

With a `part` it fails only on the ranks that have it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from attrs import field, frozen

from slotline.registry.capability import Set
from slotline.registry.contracts import BlockHash, CacheBlock, KVConnectorCapabilities, KVConnectorContext
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class Options:
    how: str = field(default="never")
    part: str = field(default="")


class Failing:
    descriptor: Descriptor[Any] = Descriptor(
        kind=Kind.KV_CONNECTOR,
        name="failing",
        capabilities=KVConnectorCapabilities(devices=Set({"cpu"})),
        factory=None,
        options=Options,
    )

    def __init__(self, context: KVConnectorContext) -> None:
        self.context = context
        self.how = context.options.how if context.options.part in context.part else "never"
        self.blocks: dict[tuple[int, BlockHash], torch.Tensor] = {}
        self.broken: set[int] = set()
        self.loading = False

    def _fail(self, where: str) -> None:
        if self.how == where:
            raise OSError("no such store")

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        self._fail("held")
        return [(group, one) in self.blocks for one in hashes]

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        self.loading = bool(loads)
        for one in saves:
            self._fail("save")
            row = torch.empty(self.context.groups[one.group].block_bytes, dtype=torch.uint8)
            self.context.copy.to_host(one.group, [one.block], [row])
            if self.how != "forgets" or one.block_hash[0] % 2:
                self.blocks[one.group, one.block_hash] = row
        for number, one in enumerate(loads):
            self._fail("load")
            row = self.blocks[one.group, one.block_hash]
            if self.how == "late" or (self.how == "some" and number % 3 == 2):
                row = torch.full_like(row, 77)  # what a later reader must not take for keys
                self.broken.add(one.block)
            self.context.copy.to_device(one.group, [one.block], [row])

    def wait(self) -> None:
        if self.loading:
            self._fail("wait")

    def failed(self) -> Collection[int]:
        self._fail("failed")
        broken, self.broken = self.broken, set()
        return broken

    def reset(self) -> None:
        self.blocks.clear()
