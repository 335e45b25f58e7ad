"""The LoRA plugin `triton`, declared for the CPU, where Triton's interpreter runs its kernels."""

from __future__ import annotations

from attrs import evolve

from slotline.plugins.lora.segmented import descriptor as segmented
from slotline.registry.capability import Set

descriptor = evolve(
    segmented,
    name="interpreted_lora",
    capabilities=evolve(segmented.capabilities, devices=Set(("cpu",)), dtypes=Set(("float32",))),
    probe=None,
)
