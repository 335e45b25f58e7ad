"""A connector whose loads end some polls after they began, in the order of neither, and may fail then."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from attrs import field, frozen
from kept_blocks import KeptBlocks

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import CacheBlock, KVConnectorCapabilities, KVConnectorContext
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class Options:
    polls: int = field(default=3)
    how: str = field(default="never")


class Slow(KeptBlocks):
    """Blocks that are on their way hold what no reader may take for keys."""

    descriptor: Descriptor[Any] = Descriptor(
        kind=Kind.KV_CONNECTOR,
        name="slow",
        capabilities=KVConnectorCapabilities(devices=Set({"cpu"}), asynchronous=Flag(True)),
        factory=None,
        options=Options,
    )

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context, context.options.how)
        self.polls = context.options.polls
        self.coming: list[tuple[int, CacheBlock]] = []  # each with its polls that are left
        self.here: set[int] = set()
        self.calls = 0

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        for one in saves:
            self.blocks[one.group, one.block_hash] = self._read(one)
        if loads:
            self._fail("start")
        for number, one in enumerate(loads):
            self._write(one, torch.full_like(self.blocks[one.group, one.block_hash], 77))
            self.coming.append((self.polls + number % 3, one))

    def wait(self) -> None:
        """Do nothing, because saves are complete."""

    def arrived(self) -> Collection[int]:
        self.calls += 1
        if self.coming:
            self._fail("arrived")
        self.coming = [(polls - 1, one) for polls, one in self.coming]
        self._end([one for polls, one in self.coming if polls <= 0])
        self.coming = [(polls, one) for polls, one in self.coming if polls > 0]
        here, self.here = self.here, set()
        return here

    def finish(self) -> None:
        self._end([one for _, one in self.coming])
        self.coming = []

    def _end(self, loads: Sequence[CacheBlock]) -> None:
        for one in loads:
            row = self.blocks.get((one.group, one.block_hash))
            if row is None or self.how == "all" or (self.how == "some" and one.block_hash[0] % 3 == 0):
                self.broken.add(one.block)
            else:
                self._write(one, row)
                self.here.add(one.block)
