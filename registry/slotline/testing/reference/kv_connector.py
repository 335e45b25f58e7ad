"""KV connector that keeps a few blocks in host memory and evicts the least recently used."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, cast
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from attrs import field, frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts import (
    BlockHash,
    CacheBlock,
    EvictedBlock,
    KVConnector,
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


class CheckedBlocks(FewBlocks):
    """Connector that keeps a digest of the name and the bytes of each block."""

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        self.digests: dict[Key, bytes] = {}

    def digest(self, key: Key, row: torch.Tensor) -> bytes:
        """Return the digest of a block."""
        return hashlib.sha256(repr(key).encode() + row.numpy().tobytes()).digest()

    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        super().save(saves, wanted)
        for key in {self.key(one.group, one.block_hash) for one in saves} & self.rows.keys():
            self.digests[key] = self.digest(key, self.rows[key])

    def load(self, loads: Iterable[CacheBlock]) -> None:
        for one in loads:
            key = self.key(one.group, one.block_hash)
            if key in self.rows and self.digest(key, self.rows[key]) != self.digests[key]:
                del self.rows[key]
            super().load([one])


def spoil(connector: KVConnector, how: str) -> bool:
    """Spoil the blocks of a connector that keeps digests, see `DamageStore`."""
    assert isinstance(connector, CheckedBlocks)
    for group in range(len(connector.context.groups)):
        keys = [key for key in connector.rows if key[0] == group]
        rows, digests = [connector.rows[key] for key in keys], [connector.digests[key] for key in keys]
        for number, key in enumerate(keys):
            if how == "changed":
                connector.rows[key][9] ^= 1
            elif how == "swapped":
                connector.rows[key], connector.digests[key] = rows[number - 1], digests[number - 1]
            else:
                del connector.rows[key]
    return True


class LayerBlocks(FewBlocks):
    """Connector that saves each layer's part when it is written, and loads blocks when the first layer attends."""

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        self.fills: list[CacheBlock] = []
        self.later: list[CacheBlock] = []
        self.parts: dict[Key, dict[int, torch.Tensor]] = {}  # by layer

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        self.save(saves, {self.key(one.group, one.block_hash) for one in loads})
        self.later += loads

    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        for one in saves:
            key, layers = self.key(one.group, one.block_hash), self.context.groups[one.group].layers
            parts = self.parts.pop(key, {})
            if any(layer.index not in parts for layer in layers):
                super().save([one], wanted)
            elif key in self.rows or self.make_room(wanted):
                self.rows[key] = torch.cat([parts[layer.index] for layer in layers])
                self.rows.move_to_end(key)

    def filling(self, blocks: Sequence[CacheBlock]) -> None:
        """Take note of what the next pass fills."""
        self.fills = [one for one in blocks if self.context.groups[one.group].layer_bytes]
        for one in self.fills:
            self.parts.pop(self.key(one.group, one.block_hash), None)
        while len(self.parts) > 4 * CAPACITY:  # of passes whose blocks were not saved
            self.parts.pop(next(iter(self.parts)))

    def wait_layer(self, layer: int) -> None:
        """Load the blocks of the layer's group."""
        group = self.group_of(layer)
        own, self.later = ([one for one in self.later if (one.group == group) is here] for here in (True, False))
        self.load(own)

    def save_layer(self, layer: int) -> None:
        """Save the layer's part of the blocks that the pass fills."""
        for one in self.fills:
            if one.group == self.group_of(layer):
                self.parts.setdefault(self.key(one.group, one.block_hash), {})[layer] = self.part(one, layer)

    def group_of(self, layer: int) -> int:
        """Return the group of a layer."""
        groups = self.context.groups
        return next(n for n, group in enumerate(groups) for one in group.layers if one.index == layer)

    def part(self, block: CacheBlock, layer: int) -> torch.Tensor:
        """Return a copy of a layer's part of a block."""
        group = self.context.groups[block.group]
        number = [one.index for one in group.layers].index(layer)
        first = sum(group.layer_bytes[:number])
        return self.copied(block)[first : first + group.layer_bytes[number]].clone()

    def reset(self) -> None:
        super().reset()
        self.parts.clear()


class LateLayerBlocks(LayerBlocks):
    """Connector that leaves no load to the layers, so that their calls may come behind the pass."""

    def wait(self) -> None:
        """Load the blocks of all layers."""
        later, self.later = self.later, []
        self.load(later)


@frozen(kw_only=True)
class PeerOptions:
    """Options of a connector that asks others."""

    peers: tuple[str, ...] = field(default=())


class PeerBlocks(LaterBlocks):
    """Connector that loads blocks and encoder outputs from others of this process, those that its options name."""

    ports: ClassVar[Iterator[int]] = count(1)
    known: ClassVar[WeakValueDictionary[str, PeerBlocks]] = WeakValueDictionary()

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        self.port = next(self.ports)
        self.known[f"127.0.0.1:{self.port}"] = self
        self.outputs: dict[str, torch.Tensor] = {}
        self.told: dict[str, torch.Tensor | None] = {}
        self.owners: dict[Key, PeerBlocks] = {}

    def peer(self, params: Mapping[str, Any]) -> PeerBlocks | None:
        """Return the connector that a request names, None if it names none that may be asked."""
        address = f"{params.get('remote_host')}:{params.get('remote_port')}"
        if not params.get("do_remote_prefill") or address not in self.context.options.peers:
            return None
        found = self.known.get(address)
        return found if found is not None and found.context.identity == self.context.identity else None

    def held_for(self, group: int, hashes: Sequence[BlockHash], params: Mapping[str, Any]) -> Sequence[bool]:
        """Return what is held here or by the peer of a request."""
        peer = self.peer(params)
        there = [False] * len(hashes) if peer is None else peer.held(group, hashes)
        if peer is not None:
            self.owners |= {self.key(group, one): peer for one, held in zip(hashes, there, strict=True) if held}
        return [here or held for here, held in zip(self.held(group, hashes), there, strict=True)]

    def answer(self, params: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return where these blocks are."""
        if not params.get("do_remote_decode"):
            return None
        return {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": self.port}

    def load(self, loads: Iterable[CacheBlock]) -> None:
        for one in loads:
            key = self.key(one.group, one.block_hash)
            owner = self.owners.pop(key, None)
            if key not in self.rows and owner is not None and key in owner.rows:
                self.context.copy.to_device(one.group, [one.block], [owner.rows[key]])
            else:
                super().load([one])

    def item_encoded(self, mm_hash: str, output: torch.Tensor) -> None:
        """Keep a copy of an output."""
        self.outputs[mm_hash] = output.detach().to("cpu", copy=True)

    def load_items(self, mm_hashes: Sequence[str], params: Mapping[str, Any]) -> None:
        """Take outputs of the peer."""
        peer = self.peer(params)
        self.told |= {one: None if peer is None else peer.outputs.get(one) for one in mm_hashes}

    def items(self) -> Mapping[str, torch.Tensor | None]:
        """Return the outputs that were taken."""
        told, self.told = self.told, {}
        return told


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
            self.write(self.file(one.group, one.block_hash), self.copied(one).numpy().tobytes())

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

checked = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="checked_blocks",
    capabilities=KVConnectorCapabilities(devices=Set(("cpu", "cuda")), damage=f"{__name__}:spoil"),
    factory=CheckedBlocks,
    summary="keeps a few blocks in host memory with digests",
)

by_layer = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="layer_blocks",
    capabilities=KVConnectorCapabilities(devices=Set(("cpu", "cuda")), layers=Flag(True)),
    factory=LayerBlocks,
    summary="keeps a few blocks in host memory, saved layer by layer",
)

late_layered = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="late_layer_blocks",
    capabilities=KVConnectorCapabilities(devices=Set(("cpu", "cuda")), layers=Flag(True), late_layers=Flag(True)),
    factory=LateLayerBlocks,
    summary="keeps a few blocks in host memory, saved layer by layer, at the latest behind the pass",
)

peers = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="peer_blocks",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")),
        asynchronous=Flag(True),
        by_request=Flag(True),
        items=Flag(True),
        states=Flag(True),
        peers="peers",
    ),
    factory=PeerBlocks,
    options=PeerOptions,
    summary="finds blocks and encoder outputs in others of the same process",
)

files = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="file_blocks",
    capabilities=KVConnectorCapabilities(devices=Set(("cpu", "cuda")), folder="folder"),
    factory=FileBlocks,
    options=FileOptions,
    summary="keeps blocks in files with digests",
)
