"""The reference plugin whose launches do not depend on slots, declared with a graph for each use of adapters."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from slotline.registry.capability import Flag
from slotline.testing.reference.lora import GatheredSlots, gathered


class Gathered(GatheredSlots):
    """Plugin that leaves out the weights of embeddings, which PEFT saves beside an adapter."""

    def weights(self, path: str, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
        own = {key: tensor for key, tensor in tensors.items() if ".base_layer." not in key}
        return super().weights(path, own, rank)


descriptor = evolve(
    gathered,
    name="gathered_lora",
    capabilities=evolve(gathered.capabilities, graph_key=True, extended=Flag(False), divided=Flag(False)),
    factory=Gathered,
)
