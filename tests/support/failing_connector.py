"""A connector that keeps blocks in a dict when they are full, and fails in the way that its options name.

With a `part` it fails only on the ranks that have it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from kept_blocks import KeptBlocks

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import CacheBlock, KVConnectorCapabilities, KVConnectorContext
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class Options:
    how: str = field(default="never")
    part: str = field(default="")


class Failing(KeptBlocks):
    descriptor: Descriptor[Any] = Descriptor(
        kind=Kind.KV_CONNECTOR,
        name="failing",
        capabilities=KVConnectorCapabilities(devices=Set({"cpu"})),
        factory=None,
        options=Options,
    )

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context, context.options.how if context.options.part in context.part else "never")
        self.loading = False

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        self.loading = bool(loads)
        for one in saves:
            self._fail("save")
            row = self._read(one)
            if self.how != "forgets" or one.block_hash[0] % 2:
                self.blocks[one.group, one.block_hash] = row
        if loads and self.how == "slow":
            time.sleep(0.7)
        for number, one in enumerate(loads):
            self._fail("load")
            row = self.blocks[one.group, one.block_hash]
            if self.how == "late" or (self.how == "some" and number % 3 == 2):
                row = torch.full_like(row, 77)  # what a later reader must not take for keys
                self.broken.add(one.block)
            self._write(one, row)

    def wait(self) -> None:
        if self.loading:
            self._fail("wait")

    def failed(self) -> set[int]:
        self._fail("failed")
        return super().failed()


class FailingStates(Failing):
    """One that takes states too."""

    descriptor: Descriptor[Any] = evolve(
        Failing.descriptor, capabilities=evolve(Failing.descriptor.capabilities, states=Flag(True))
    )
