"""Language models of transformers that hear recordings through an audio encoder. This module does not import torch."""

from __future__ import annotations

from attrs import evolve

from slotline.plugins.model_families import vision
from slotline.registry.capability import Set
from slotline.registry.contracts.model_family import ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor, Kind

MASKED: tuple[str, ...] = ("Qwen2AudioForConditionalGeneration",)
"""Models that have no embeddings for the silence that fills a window."""

ARCHITECTURES: tuple[str, ...] = (*MASKED, "VoxtralForConditionalGeneration")
"""Every one is compared with transformers' own text by the tests."""

descriptor: Descriptor[ModelFamilyCapabilities] = Descriptor(
    kind=Kind.MODEL_FAMILY,
    name="transformers_audio",
    capabilities=evolve(vision.descriptor.capabilities, architectures=Set(ARCHITECTURES)),
    factory="slotline.plugins.model_families.audio_model:TransformersAudio",
    options="slotline.plugins.model_families.decoder:DecoderOptions",
    summary="checkpoints that take recordings and text, in Hugging Face format, through transformers' own modules",
)
