"""KV connector that keeps a few blocks in host memory and evicts the least recently used."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import cast
from uuid import uuid4

import torch
from attrs import field, frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts import (
    BlockHash,
    CacheBlock,
    EvictedBlock,
    KVConnectorCapabilities,
    KVConnectorContext,
    LayerBlockCopy,
)
from slotline.registry.descriptor import Descriptor, Kind

CAPACITY = 16
"""Blocks."""

Key = tuple[int, BlockHash]


@frozen(kw_only=True)
class MemoryOptions:
    """Options of a connector with memory for some blocks."""

    memory: str = field(default="12KiB")


class FewBlocks:
    """Connector that copies immediately, so that there is nothing to wait for."""

    def __init__(self, context: KVConnectorContext) -> None:
        self.context = context
        self.capacity = CAPACITY
        if isinstance(context.options, MemoryOptions):
            self.capacity = size_in_bytes(context.options.memory) // max(one.block_bytes for one in context.groups)
        self.rows: OrderedDict[Key, torch.Tensor] = OrderedDict()
        self.missing: set[int] = set()

    def key(self, group: int, block_hash: BlockHash) -> Key:
        """Return the key of a block."""
        return group, block_hash

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [self.key(group, one) in self.rows for one in hashes]

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        wanted = {self.key(one.group, one.block_hash) for one in loads}
        self.save(saves, wanted)
        self.load(loads)

    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        """Keep blocks, as far as the `wanted` blocks leave room."""
        for one in saves:
            key = self.key(one.group, one.block_hash)
            if key not in self.rows and not self.make_room(wanted):
                continue
            self.rows[key] = self.copied(one)
            self.rows.move_to_end(key)

    def copied(self, block: CacheBlock) -> torch.Tensor:
        """Return the bytes of a block."""
        row = torch.empty(self.context.groups[block.group].block_bytes, dtype=torch.uint8)
        self.context.copy.to_host(block.group, [block.block], [row])
        return row

    def load(self, loads: Iterable[CacheBlock]) -> None:
        """Load blocks. Missing blocks have failed."""
        for one in loads:
            row = self.rows.get(self.key(one.group, one.block_hash))
            if row is None:
                self.missing.add(one.block)
            else:
                self.context.copy.to_device(one.group, [one.block], [row])

    def make_room(self, wanted: Collection[Key]) -> bool:
        """Return True if there is room for a block, after dropping one if necessary."""
        free = next((key for key in self.rows if key not in wanted), None)
        if len(self.rows) >= self.capacity:
            if free is None:
                return False
            row = self.rows.pop(free)
            if self.context.evicted is not None:
                self.context.evicted([EvictedBlock(*free, row)])
        return True

    def wait(self) -> None:
        """Do nothing, because all copies are complete."""

    def failed(self) -> Collection[int]:
        missing, self.missing = self.missing, set()
        return missing

    def reset(self) -> None:
        self.rows.clear()


class OneCopyForAll(FewBlocks):
    """Connector that reads and writes the blocks of a group in one call."""

    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        for group, own in enumerate(self.context.groups):
            mine = [one for one in saves if one.group == group and self.key(group, one.block_hash) not in self.rows]
            mine = mine[: CAPACITY - len(self.rows)]
            rows = torch.empty((len(mine), own.block_bytes), dtype=torch.uint8)
            if mine:
                self.context.copy.to_host(group, [one.block for one in mine], list(rows))
            self.rows.update({self.key(group, one.block_hash): row for one, row in zip(mine, rows, strict=True)})


class LaterBlocks(FewBlocks):
    """Asynchronous connector whose loads end when it is asked for the second time."""

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        self.coming: list[list[CacheBlock]] = [[], []]  # those that end at the next call first
        self.here: set[int] = set()

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        self.save(saves, {self.key(one.group, one.block_hash) for one in loads})
        self.coming[-1] += loads

    def arrived(self) -> Collection[int]:
        """Return the blocks whose load has ended well."""
        self.end(self.coming.pop(0))
        self.coming.append([])
        here, self.here = self.here, set()
        return here

    def finish(self) -> None:
        """End all loads."""
        for loads in self.coming:
            self.end(loads)
        self.coming = [[], []]

    def end(self, loads: Sequence[CacheBlock]) -> None:
        """End loads."""
        self.load(loads)
        self.here |= {one.block for one in loads} - self.missing


class LastingBlocks(LaterBlocks):
    """Connector that reads the blocks that it saves when it is asked for the second time."""

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        self.leaving: list[list[CacheBlock]] = [[], []]  # those that are saved at the next call first
        self.done: set[int] = set()

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        self.leaving[-1] += saves
        self.coming[-1] += loads

    def saved(self) -> Collection[int]:
        """Return the blocks whose save has ended."""
        self.take(self.leaving.pop(0))
        self.leaving.append([])
        done, self.done = self.done, set()
        return done

    def finish(self) -> None:
        """End all loads and saves."""
        super().finish()
        for saves in self.leaving:
            self.take(saves)
        self.leaving = [[], []]

    def take(self, saves: Sequence[CacheBlock]) -> None:
        """Save blocks. What is about to be loaded stays."""
        self.save(saves, {self.key(one.group, one.block_hash) for loads in self.coming for one in loads})
        self.done |= {one.block for one in saves}


class LayeredBlocks(FewBlocks):
    """Connector that copies the parts of a block as their layers are told."""

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        self.parts: dict[CacheBlock, torch.Tensor] = {}  # of blocks that are not saved yet
        self.now: list[CacheBlock] = []

    def filling(self, blocks: Sequence[CacheBlock]) -> None:
        """Note the blocks of a pass. What an earlier one has made of them is written over."""
        self.now = list(blocks)
        for one in blocks:
            self.parts[one] = torch.empty(self.context.groups[one.group].block_bytes, dtype=torch.uint8)

    def wait_layer(self, layer: int) -> None:
        """Do nothing, because loads are complete."""

    def save_layer(self, layer: int) -> None:
        """Copy a layer's part of the blocks."""
        for number, group in enumerate(self.context.groups):
            for position, own in enumerate(group.layers):
                if own.index == layer:
                    self.copy_part(number, position)

    def copy_part(self, group: int, position: int) -> None:
        """Copy the part of the layer at a position in a group."""
        own = [one for one in self.now if one.group == group]
        copy = cast("LayerBlockCopy", self.context.copy)
        is_over = copy.begin_layer_to_host(
            group, position, [one.block for one in own], [self.parts[one] for one in own]
        )
        while not is_over():
            pass

    def copied(self, block: CacheBlock) -> torch.Tensor:
        return self.parts.pop(block) if block in self.parts else super().copied(block)


@frozen(kw_only=True)
class FileOptions:
    """Options of a connector with files."""

    folder: str = field(default="")


class FileBlocks(FewBlocks):
    """Connector whose blocks are files that outlive the process, each with a digest of its name and its bytes."""

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        self.folder = Path(context.options.folder) / self.owner()
        self.folder.mkdir(parents=True, exist_ok=True)

    def owner(self) -> str:
        """Return the name of the folder of this model's blocks."""
        return self.context.identity

    def file(self, group: int, block_hash: BlockHash) -> Path:
        """Return the file of a block."""
        return self.folder / f"{group}-{block_hash.hex()}"

    def digest(self, file: Path, data: bytes) -> bytes:
        """Return the digest of a block."""
        return hashlib.sha256(file.name.encode() + data).digest()

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [self.file(group, one).exists() for one in hashes]

    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        for one in saves:
            row = torch.empty(self.context.groups[one.group].block_bytes, dtype=torch.uint8)
            self.context.copy.to_host(one.group, [one.block], [row])
            self.write(self.file(one.group, one.block_hash), row.numpy().tobytes())

    def write(self, file: Path, data: bytes) -> None:
        """Write a file as a whole, or none if the disk is full."""
        written = file.with_suffix(".new")
        try:
            written.write_bytes(self.digest(file, data) + data)
            written.replace(file)
        except OSError:
            written.unlink(missing_ok=True)

    def load(self, loads: Iterable[CacheBlock]) -> None:
        for one in loads:
            data = self.read(self.file(one.group, one.block_hash), self.context.groups[one.group].block_bytes)
            if data is None:
                self.missing.add(one.block)
            else:
                row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                self.context.copy.to_device(one.group, [one.block], [row])

    def read(self, file: Path, size: int) -> bytes | None:
        """Return the bytes of a file, None if they are wrong."""
        try:
            found = file.read_bytes()
        except OSError:
            return None
        data = found[32:]
        return data if len(data) == size and self.digest(file, data) == found[:32] else None

    def reset(self) -> None:
        self.folder = self.folder.with_name(f"{self.owner()}-{uuid4().hex}")
        self.folder.mkdir()


descriptor = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="few_blocks",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")), saves="evicted", room="memory", spills=Flag(True)
    ),
    factory=FewBlocks,
    options=MemoryOptions,
    summary="keeps a few blocks in host memory",
)

one_copy = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="one_copy",
    capabilities=KVConnectorCapabilities(devices=Set(("cpu", "cuda"))),
    factory=OneCopyForAll,
    summary="keeps the first few blocks that are full, copied together",
)

later = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="later_blocks",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")), saves="evicted", asynchronous=Flag(True), states=Flag(True)
    ),
    factory=LaterBlocks,
    summary="keeps a few blocks in host memory, and loads them later",
)

lasting = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="lasting_blocks",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")), asynchronous=Flag(True), states=Flag(True), lasting_saves=Flag(True)
    ),
    factory=LastingBlocks,
    summary="keeps a few blocks in host memory, and saves and loads them later",
)

layered = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="layered_blocks",
    capabilities=KVConnectorCapabilities(devices=Set(("cpu", "cuda")), layers=Flag(True), late_layers=Flag(True)),
    factory=LayeredBlocks,
    summary="keeps a few blocks in host memory, copied layer by layer",
)

files = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="file_blocks",
    capabilities=KVConnectorCapabilities(devices=Set(("cpu", "cuda")), folder="folder"),
    factory=FileBlocks,
    options=FileOptions,
    summary="keeps blocks in files with digests",
)
