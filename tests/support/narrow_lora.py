"""A LoRA plugin that holds low ranks alone."""

from __future__ import annotations

from slotline.registry.capability import Max, Set
from slotline.registry.contracts import LoraCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing.reference.lora import PaddedSlots

descriptor = Descriptor(
    kind=Kind.LORA,
    name="narrow_lora",
    capabilities=LoraCapabilities(
        devices=Set(None), dtypes=Set(("float32",)), target_modules=Set(None), max_rank=Max(16), max_adapters=Max(8)
    ),
    factory=PaddedSlots,
)
