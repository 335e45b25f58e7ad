"""The LoRA plugin `torch`: two products for each adapter in the batch. This module does not import torch."""

from __future__ import annotations

from slotline.registry.capability import Flag, GraphSupport, Level, Max, Set
from slotline.registry.contracts.lora import LoraCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor: Descriptor[LoraCapabilities] = Descriptor(
    kind=Kind.LORA,
    name="torch",
    capabilities=LoraCapabilities(
        devices=Set(None),
        dtypes=Set(("float32", "bfloat16", "float16")),
        target_modules=Set(None),
        max_rank=Max(),
        max_adapters=Max(),
        rslora=Flag(True),
        graphs=Level(GraphSupport.NEVER),
        embeddings=Flag(True),
        staged=Flag(True),
        divided=Flag(True),
        batch_invariant=Flag(True),
    ),
    factory="slotline.plugins.lora.grouped.plugin:GroupedLora",
    summary="two products of torch for each adapter in the batch, on any device",
)
