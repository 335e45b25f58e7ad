"""Speech recognition models of transformers: an encoder for sound, a decoder for text. This module imports no torch."""

from __future__ import annotations

from slotline.registry.capability import Max, Set
from slotline.registry.contracts.model_family import ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor, Kind

ARCHITECTURES: tuple[str, ...] = ("WhisperForConditionalGeneration",)
"""Compared with transformers' own tokens by the tests."""

descriptor: Descriptor[ModelFamilyCapabilities] = Descriptor(
    kind=Kind.MODEL_FAMILY,
    name="transformers_speech",
    capabilities=ModelFamilyCapabilities(
        architectures=Set(ARCHITECTURES),
        devices=Set(("cpu", "cuda")),
        tasks=Set(("generate", "transcription")),
        tensor=Max(),
    ),
    factory="slotline.plugins.model_families.speech_model:TransformersSpeech",
    summary="Whisper checkpoints in Hugging Face format: audio in, text out",
)
