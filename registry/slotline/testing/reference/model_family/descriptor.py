"""Descriptor of the reference family. Imports no torch."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.model_family import ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor, Kind

ARCHITECTURE = "SlotlineReferenceDecoder"

descriptor: Descriptor[ModelFamilyCapabilities] = Descriptor(
    kind=Kind.MODEL_FAMILY,
    name="reference_family",
    capabilities=ModelFamilyCapabilities(
        architectures=Set((ARCHITECTURE,)),
        tasks=Set(("generate", "embed")),
        taps=Flag(True),
        fast_prefill=Flag(True),
        prompt_embeds=Flag(True),
    ),
    factory="slotline.testing.reference.model_family.family:ReferenceFamily",
    summary="a small decoder with every form of attention layer",
)
