"""The LoRA plugin `triton`: segmented products for all adapters of a batch at once. Does not import torch."""

from __future__ import annotations

from typing import Any

from slotline.kernels.triton_support import why_no_triton
from slotline.registry.capability import Flag, GraphSupport, Level, Max, Set
from slotline.registry.contracts.lora import LoraCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind


def probe(device: DeviceInfo) -> Any:
    """Return the offer, if Triton's kernels can run."""
    if device.type == "cuda" and (reason := why_no_triton()):
        return reason
    return descriptor.capabilities


descriptor: Descriptor[LoraCapabilities] = Descriptor(
    kind=Kind.LORA,
    name="triton",
    capabilities=LoraCapabilities(
        devices=Set(("cuda",)),
        dtypes=Set(("float32", "bfloat16", "float16")),
        target_modules=Set(None),
        max_rank=Max(128),
        max_adapters=Max(256),
        rslora=Flag(True),
        graphs=Level(GraphSupport.ALWAYS),
        merged=Flag(True),
        embeddings=Flag(True),
        extended=Flag(True),
        single=Flag(True),
        staged=Flag(True),
        divided=Flag(True),
        batch_invariant=Flag(True),
    ),
    factory="slotline.plugins.lora.segmented.plugin:SegmentedLora",
    probe="slotline.plugins.lora.segmented:probe",
    summary="segmented shrink and expand in Triton, captured in graphs",
)
