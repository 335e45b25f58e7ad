"""A connector that loads and saves the part of each layer where it is called for the layer."""

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
    how: str = field(default="never")


class Layered(KeptBlocks):
    """Blocks in parts by layer. It reads none of a block's bytes but in `save_layer`, and writes none but there."""

    descriptor: Descriptor[Any] = Descriptor(
        kind=Kind.KV_CONNECTOR,
        name="layered",
        capabilities=KVConnectorCapabilities(devices=Set({"cpu"}), layers=Flag(True)),
        factory=None,
        options=Options,
    )

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context, context.options.how)
        self.parts: dict[tuple[int, bytes, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.whole: set[tuple[int, bytes]] = set()
        self.fills: Sequence[CacheBlock] = ()
        self.loads: Sequence[CacheBlock] = ()
        self.calls: list[tuple[str, int]] = []

    def held(self, group: int, hashes: Sequence[bytes]) -> Sequence[bool]:
        return [(group, one) in self.whole for one in hashes]

    def filling(self, blocks: Sequence[CacheBlock]) -> None:
        self.fills = blocks

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        for one in saves:
            layers = self.context.groups[one.group].layers
            if all((one.group, one.block_hash, layer.index) in self.parts for layer in layers):
                self.whole.add((one.group, one.block_hash))
        self.loads = [*self.loads, *loads]
        for one in loads:
            for layer in self.context.groups[one.group].layers:
                cache = self.context.caches[layer.index]
                cache.key[one.block] = cache.value[one.block] = 77.0

    def wait(self) -> None:
        """Leave it to the layers."""

    def wait_layer(self, layer: int) -> None:
        self.calls.append(("wait", layer))
        self._fail("wait_layer")
        for one in self.loads:
            if (one.group, one.block_hash, layer) in self.parts:
                cache = self.context.caches[layer]
                cache.key[one.block], cache.value[one.block] = self.parts[one.group, one.block_hash, layer]

    def save_layer(self, layer: int) -> None:
        self.calls.append(("save", layer))
        self._fail("save_layer")
        for one in self.fills:
            if any(own.index == layer for own in self.context.groups[one.group].layers):
                cache = self.context.caches[layer]
                part = cache.key[one.block].clone(), cache.value[one.block].clone()
                self.parts[one.group, one.block_hash, layer] = part

    def failed(self) -> Collection[int]:
        self.fills = self.loads = ()
        return super().failed()

    def reset(self) -> None:
        self.parts.clear()
        self.whole.clear()
