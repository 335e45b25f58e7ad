"""A connector whose blocks are files of a folder that several engines and ranks share."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from attrs import field, frozen

from slotline.registry.capability import Set
from slotline.registry.contracts import BlockHash, CacheBlock, KVConnectorCapabilities, KVConnectorContext
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class Options:
    folder: str = field()


class Shared:
    descriptor: Descriptor[Any] = Descriptor(
        kind=Kind.KV_CONNECTOR,
        name="shared_files",
        capabilities=KVConnectorCapabilities(devices=Set({"cpu"})),
        factory=None,
        options=Options,
    )

    def __init__(self, context: KVConnectorContext) -> None:
        self.context = context
        self.folder = Path(context.options.folder) / context.identity
        self.folder.mkdir(parents=True, exist_ok=True)
        self.missing: set[int] = set()

    def file(self, group: int, block_hash: BlockHash) -> Path:
        return self.folder / f"{group}-{block_hash.hex()}"

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [self.file(group, one).exists() for one in hashes]

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        for one in saves:
            row = torch.empty(self.context.groups[one.group].block_bytes, dtype=torch.uint8)
            self.context.copy.to_host(one.group, [one.block], [row])
            written = self.folder / uuid4().hex
            written.write_bytes(row.numpy().tobytes())
            os.replace(written, self.file(one.group, one.block_hash))
        for one in loads:
            try:
                found = bytearray(self.file(one.group, one.block_hash).read_bytes())
            except OSError:
                self.missing.add(one.block)
                continue
            self.context.copy.to_device(one.group, [one.block], [torch.frombuffer(found, dtype=torch.uint8)])

    def wait(self) -> None:
        """Do nothing, because all copies are complete."""

    def failed(self) -> Collection[int]:
        missing, self.missing = self.missing, set()
        return missing

    def reset(self) -> None:
        for one in self.folder.iterdir():
            one.unlink(missing_ok=True)
