"""A connector that reads the blocks that it saves some polls later, and sees if they have changed meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from slow_connector import Options, Slow

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import CacheBlock, KVConnectorCapabilities, KVConnectorContext
from slotline.registry.descriptor import Descriptor, Kind


class SlowSaver(Slow):
    """Counts blocks that were overwritten before they were read, and the most that it had under way."""

    descriptor: Descriptor[Any] = Descriptor(
        kind=Kind.KV_CONNECTOR,
        name="slow_saver",
        capabilities=KVConnectorCapabilities(
            devices=Set({"cpu"}), asynchronous=Flag(True), states=Flag(True), lasting_saves=Flag(True)
        ),
        factory=None,
        options=Options,
    )

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        self.leaving: list[tuple[int, CacheBlock, torch.Tensor]] = []  # each with its polls that are left
        self.done: set[int] = set()
        self.spoiled = self.most = 0

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        if saves:
            self._fail("save")
        self.leaving += [(self.polls + number % 3, one, self._read(one)) for number, one in enumerate(saves)]
        self.most = max(self.most, len(self.leaving))
        super().start((), loads)

    def saved(self) -> Collection[int]:
        self.leaving = [(polls - 1, one, was) for polls, one, was in self.leaving]
        self._save([(one, was) for polls, one, was in self.leaving if polls <= 0])
        self.leaving = [(polls, one, was) for polls, one, was in self.leaving if polls > 0]
        done, self.done = self.done, set()
        return done

    def finish(self) -> None:
        super().finish()
        self._save([(one, was) for _, one, was in self.leaving])
        self.leaving = []

    def _save(self, saves: Sequence[tuple[CacheBlock, torch.Tensor]]) -> None:
        for one, was in saves:
            row = self._read(one)
            self.spoiled += not torch.equal(row, was)
            self.blocks[one.group, one.block_hash] = row
            self.done.add(one.block)
