"""Simulated pool for a KV connector: the effect of a step on its blocks, and the expected content of each block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, cast
from uuid import uuid4

import torch
from attrs import evolve

from slotline.registry.contracts import (
    AsyncKVConnector,
    AttentionLayer,
    BlockHash,
    CacheBlock,
    ConnectorGroup,
    KVCache,
    KVConnector,
    KVConnectorCapabilities,
    KVConnectorContext,
    LastingKVConnector,
    LayerKVConnector,
    StateLayer,
    StateTensorSpec,
)
from slotline.testing.check import Failed, Run
from slotline.testing.environments.kv_copies import PoolCopy, part_of
from slotline.testing.reference import kv_connector as reference
from slotline.testing.subject import Subject

NUM_BLOCKS = 80
TOKENS = 4
NUM_STATES = 6
STATE = 2
"""Index of the group of states, of a connector that takes them."""
PATIENCE = 5.0
"""Seconds in which loads must end."""
LAYERS = ((0, 16), (0, 8), (1, 16))
"""Of each layer, its group and head size: two groups whose blocks have 768 and 512 bytes."""


PARTS = ("tensor 0/2", "tensor 1/2")
"""Of two ranks that share a model."""


class Pool:
    """Blocks of random bytes in two cache groups, and the connector.

    A connector that takes states has a third group of a few large blocks, which are numbered from `NUM_BLOCKS` on.
    Nothing that the connector is given leads to it, so that it ends with the pool.

    A forward pass overwrites every saved block and reads every loaded block. All other writes of a connector are
    faults.

    Attributes:
        late: whether a connector that is called at layers is called behind the passes.
        bytes: bytes of each group, [NUM_BLOCKS, block_bytes] uint8 on the device, and [NUM_STATES, block_bytes].
        known: expected content of a group's block with a hash.

    Args:
        part: what the pool's rank has of each block, empty for all of it.
        beside: a pool with the same model and the same folder. None for a model of its own.
        model: another model's name than that of `beside`.
        room: KiB of the store, of a connector that says by which option.
        peers: addresses of the connectors that this one may ask, of a connector that says by which option.
    """

    def __init__(
        self,
        run: Run,
        part: str = "",
        beside: Pool | None = None,
        model: str = "",
        room: int | None = None,
        peers: tuple[str, ...] = (),
    ) -> None:
        self.model: str = model or (f"the suite {uuid4().hex}" if beside is None else beside.model)
        self.folder: TemporaryDirectory[str] = (
            TemporaryDirectory(prefix="slotline-suite-") if beside is None else beside.folder
        )
        self.device = run.subject.device.type
        self.rng: Random = run.rng
        layers = [_layer(index, size) for index, (_, size) in enumerate(LAYERS)]
        owned = [[layer for layer, (of, _) in zip(layers, LAYERS, strict=True) if of == group] for group in (0, 1)]
        self.groups = tuple(
            ConnectorGroup(
                name=f"group {number}",
                layers=tuple(own),
                kv_dtype="float32",
                layout="NHD",
                block_size=TOKENS,
                kernel_block_size=TOKENS,
                block_bytes=sum(map(_page, own)),
                layer_bytes=tuple(map(_page, own)),
            )
            for number, own in enumerate(owned)
        )
        if run.subject.capabilities.states.support:
            self.groups += (_states(len(LAYERS)),)
        numbers = [range(NUM_BLOCKS), range(NUM_BLOCKS), range(NUM_BLOCKS, NUM_BLOCKS + NUM_STATES)]
        self.bytes = [self._random(len(own), one.block_bytes) for one, own in zip(self.groups, numbers, strict=False)]
        self.known: dict[tuple[int, BlockHash], torch.Tensor] = {}
        caches: dict[int, KVCache] = {}
        for group, memory in zip(self.groups, self.bytes, strict=True):
            first = 0
            for layer in group.layers:
                pages = memory[:, first : first + _page(layer)].view(torch.float32)
                pages = pages.unflatten(1, (2, TOKENS, 1, layer.head_size))
                caches[layer.index] = KVCache(pages[:, 0], pages[:, 1])
                first += _page(layer)
        self.context = KVConnectorContext(
            contract=1,
            groups=self.groups,
            caches=caches,
            num_blocks=NUM_BLOCKS,
            num_states=NUM_STATES if len(self.groups) > STATE else 0,
            copy=PoolCopy(self.groups, self.bytes, numbers),
            device=self.device,
            model=f"{self.model}:{part}" if part else self.model,
            part=part,
            inner=_reference_connectors(),
        )
        self.connector: KVConnector = in_folder(run, self.folder.name, room, peers).build(self.context)
        self.asynchronous = bool(run.subject.capabilities.asynchronous.support)
        self.lasting = bool(run.subject.capabilities.lasting_saves.support)
        self.layered = bool(run.subject.capabilities.layers.support)
        self.late = False

    @property
    def files(self) -> list[Path]:
        """Return the files of a connector that keeps its blocks in a folder, in order."""
        return sorted(one for one in Path(self.folder.name).rglob("*") if one.is_file())

    @property
    def layer_calls(self) -> LayerKVConnector:
        """Return the connector, if it is called at layers."""
        return cast("LayerKVConnector", self.connector)

    def block(self, group: int, name: str, block: int) -> CacheBlock:
        """Return a block of the pool with the content of the hash of `name`."""
        block_hash = name.encode()
        if (group, block_hash) not in self.known:
            self.known[group, block_hash] = self._random(1, self.groups[group].block_bytes)[0]
        self.bytes[group][place(group, block)] = self.known[group, block_hash]
        return CacheBlock(group, block_hash, block)

    def forward(self, blocks: Sequence[CacheBlock], *, good: bool = True) -> None:
        """Run a forward pass that fills blocks, and tell the connector of each layer.

        Args:
            good: whether the blocks get the content of their hashes, or the step fails, and they get something else.
        """
        connector = cast("LayerKVConnector", self.connector)
        connector.filling(blocks)
        self.connector.wait()
        for one in blocks:
            if (one.group, one.block_hash) not in self.known:
                self.known[one.group, one.block_hash] = self._random(1, self.groups[one.group].block_bytes)[0]
        for index, (group, _) in enumerate(LAYERS):
            connector.wait_layer(index)
            first, end = part_of(self.groups[group], [layer.index for layer in self.groups[group].layers].index(index))
            for one in blocks:
                if one.group == group:
                    right = self.known[group, one.block_hash]
                    content = right if good else self._random(1, len(right))[0]
                    self.bytes[group][one.block, first:end] = content[first:end]
            connector.save_layer(index)

    def filling(self, group: int, name: str, block: int) -> CacheBlock:
        """Return a block of the pool that a pass is to fill with the content of the hash of `name`."""
        found = self.block(group, name, block)
        self.bytes[group][block] = self._random(1, self.groups[group].block_bytes)[0]
        return found

    def wanted(self, group: int, name: str, block: int) -> CacheBlock:
        """Return a block of the pool that the hash of `name` should be loaded into."""
        return CacheBlock(group, name.encode(), block)

    def held(self, group: int, names: Sequence[str]) -> list[bool]:
        """Return the connector's answer of `held`.

        Raises:
            Failed: if there is not one answer for each block.
        """
        found = list(self.connector.held(group, [name.encode() for name in names]))
        if len(found) != len(names) or not all(isinstance(one, bool) for one in found):
            raise Failed(f"held answers {found!r} for {len(names)} hashes, expected as many of True and False")
        return found

    def step(
        self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock], fills: Sequence[CacheBlock] = ()
    ) -> set[int]:
        """Run one step with its forward pass, and return the blocks whose load failed according to the connector.

        Args:
            saves: blocks to be saved. The pool reuses them afterwards.
            loads: blocks to be loaded.
            fills: blocks that the pass fills, of a connector that is called at layers.

        Raises:
            Failed: if a loaded block has wrong content, or another block was written.
        """
        before = [memory.clone() for memory in self.bytes]
        self.connector.start(saves, loads)
        if self.layered:
            self.layer_calls.filling(list(fills))
        self.connector.wait()
        failed = self.ended(loads) if self.asynchronous else set[int]()
        lacking = self.attend(loads, fills) if self.layered else set[int]()
        seen = [memory.clone() for memory in self.bytes]
        self.saves_ended([one for one in saves if one.block not in {load.block for load in loads}])
        for one in saves:  # the pool reuses them
            self.bytes[one.group][place(*_at(one))] = self._random(1, self.groups[one.group].block_bytes)[0]
        failed |= set(self.connector.failed())
        if strange := failed - {one.block for one in loads}:
            raise Failed(f"blocks {sorted(strange)} are said to have failed, and were not to be loaded")
        if lacking := lacking - failed:
            raise Failed(f"the loads into {sorted(lacking)} were not there when a layer attended, and did not fail")
        for group, (old, new) in enumerate(zip(before, seen, strict=True)):
            changed = set((old != new).any(1).nonzero().flatten().tolist())
            if wrong := changed - {place(*_at(one)) for one in (*loads, *fills) if one.group == group}:
                raise Failed(f"blocks {sorted(wrong)} of group {group} were written, and were not to be loaded")
        for one in loads:
            found = seen[one.group][place(*_at(one))]
            good = torch.equal(found, self.known.get((one.group, one.block_hash), seen[0][:0]))
            if one.block not in failed and not good:
                raise Failed(
                    f"block {one.block} of group {one.group} was loaded for {one.block_hash!r}, holds something else "
                    "when the forward pass reads it, and is not said to have failed"
                )
        return failed

    def attend(self, loads: Sequence[CacheBlock], fills: Sequence[CacheBlock], count: int | None = None) -> set[int]:
        """Run the attention of each layer, or of the first `count`. Each writes its part of the blocks to be filled.

        Return the blocks of loads whose part was not there when its layer attended.
        """
        connector, lacking = self.layer_calls, set[int]()
        parts = [(layer.index, number) for number, one in enumerate(self.groups) for layer in one.layers]
        parts = sorted(parts)[:count]
        for index, number in parts:
            if not self.late:
                connector.wait_layer(index)
            lacking |= {one.block for one in loads if one.group == number and not self._has(one, index)}
            for one in fills:
                if one.group == number:
                    cut = self._cut(number, index)
                    self.bytes[number][one.block, cut] = self.known[number, one.block_hash][cut]
            if not self.late:
                connector.save_layer(index)
        for index, _ in parts if self.late else ():
            connector.wait_layer(index)
            connector.save_layer(index)
        return lacking

    def _has(self, block: CacheBlock, index: int) -> bool:
        """Return whether a block has the bytes of a layer that its hash stands for."""
        known, cut = self.known.get((block.group, block.block_hash)), self._cut(block.group, index)
        return known is not None and torch.equal(self.bytes[block.group][block.block, cut], known[cut])

    def _cut(self, group: int, index: int) -> slice:
        """Return the place of a layer's bytes in the blocks of its group."""
        layers = self.groups[group].layers
        sizes = [_page(layer) for layer in layers]
        number = [layer.index for layer in layers].index(index)
        return slice(sum(sizes[:number]), sum(sizes[: number + 1]))

    def ended(self, loads: Sequence[CacheBlock]) -> set[int]:
        """Wait until loads have ended that take their own time. Return the blocks of those that failed.

        Raises:
            Failed: if a block is said to have arrived that has wrong content, or a load does not end.
        """
        if not self.asynchronous:
            return set(self.connector.failed())
        connector = cast("AsyncKVConnector", self.connector)
        left, failed, latest = {one.block: one for one in loads}, set[int](), time.monotonic() + PATIENCE
        while left:
            arrived = set(connector.arrived())
            failed |= set(connector.failed())
            if strange := arrived - left.keys():
                raise Failed(f"blocks {sorted(strange)} are said to have arrived, and were not under way")
            for one in map(left.__getitem__, arrived):
                content = self.bytes[one.group][place(*_at(one))]
                if not torch.equal(content, self.known.get((one.group, one.block_hash), content[:0])):
                    raise Failed(f"block {one.block} is said to have arrived, and holds something else")
            left = {block: one for block, one in left.items() if block not in arrived | failed}
            if left and time.monotonic() > latest:
                raise Failed(f"the loads into {sorted(left)} have not ended after {PATIENCE:g} s")
        return failed

    def saves_ended(self, saves: Sequence[CacheBlock]) -> None:
        """Wait until saves have ended that take their own time. Each block is overwritten as soon as it may be.

        Raises:
            Failed: if a save does not end, or a block is said to be saved that was not to be.
        """
        left, latest = {one.block: one for one in saves} if self.lasting else {}, time.monotonic() + PATIENCE
        while left:
            saved = set(cast("LastingKVConnector", self.connector).saved())
            if strange := saved - left.keys():
                raise Failed(f"blocks {sorted(strange)} are said to be saved, and were not under way")
            for one in map(left.pop, saved):
                self.bytes[one.group][place(*_at(one))] = self._random(1, self.groups[one.group].block_bytes)[0]
            if left and time.monotonic() > latest:
                raise Failed(f"the saves of {sorted(left)} have not ended after {PATIENCE:g} s")

    def _random(self, count: int, size: int) -> torch.Tensor:
        data = bytearray(self.rng.randbytes(count * size))
        return torch.frombuffer(data, dtype=torch.uint8).view(count, size).to(self.device)


def _reference_connectors() -> Callable[[str, KVConnectorContext], tuple[KVConnectorCapabilities, KVConnector]]:
    """Return a function for connectors that are made of others: one that loads at once for the first, later ones then.

    They stand for the connectors that its options name.
    """
    left = [reference.descriptor, reference.later, reference.one_copy]

    def build(_name: str, context: KVConnectorContext) -> tuple[KVConnectorCapabilities, KVConnector]:
        descriptor = left.pop(0) if len(left) > 1 else left[0]
        factory: Callable[[KVConnectorContext], KVConnector] = descriptor.factory
        return descriptor.capabilities, factory(context)

    return build


def in_folder(run: Run, folder: str, room: int | None = None, peers: tuple[str, ...] = ()) -> Subject:
    """Return the plugin under test, which keeps its blocks in a folder if it keeps them in files.

    Args:
        room: KiB of its store, if it says by which option.
        peers: that it may ask, if it says by which option.
    """
    capabilities, given = run.subject.capabilities, dict[str, Any]()
    if capabilities.folder:
        given[capabilities.folder] = folder
    if capabilities.room and room is not None:
        given[capabilities.room] = f"{room}KiB"
    if capabilities.peers and peers:
        given[capabilities.peers] = peers
    return evolve(run.subject, options=evolve(run.subject.options, **given)) if given else run.subject


def place(group: int, block: int) -> int:
    """Return the row of a block in the memory of its group."""
    return block - NUM_BLOCKS if group == STATE else block


def _at(block: CacheBlock) -> tuple[int, int]:
    return block.group, block.block


def _states(index: int) -> ConnectorGroup:
    tensor = StateTensorSpec(name="ssm", shape=(16, 64), dtype="float32")
    facts = {"channels": 16, "state_size": 64, "dt_softplus": False}
    layer = StateLayer(name=f"layer {index}", index=index, state_kind="mamba1", tensors=(tensor,), facts=facts)
    return ConnectorGroup(
        name="states",
        layers=(),
        states=(layer,),
        kv_dtype="uint8",
        layout="",
        block_size=TOKENS,
        kernel_block_size=TOKENS,
        block_bytes=4 * tensor.num_elements,
    )


def _layer(index: int, size: int) -> AttentionLayer:
    return AttentionLayer(
        name=f"layer {index}", index=index, num_heads=1, num_kv_heads=1, head_size=size, head_size_v=size, scale=1.0
    )


def _page(layer: AttentionLayer) -> int:
    """Return the bytes of a block's keys and values."""
    return 2 * TOKENS * layer.head_size * 4
