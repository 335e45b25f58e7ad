"""Text-to-text models of transformers: an encoder for one text, a decoder for another. This module imports no torch."""

from __future__ import annotations

from slotline.registry.capability import Set
from slotline.registry.contracts.model_family import ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor, Kind

ARCHITECTURES: tuple[str, ...] = (
    "BartForConditionalGeneration",
    "M2M100ForConditionalGeneration",
    "MBartForConditionalGeneration",
    "MarianMTModel",
    "PegasusForConditionalGeneration",
    "T5ForConditionalGeneration",
)
"""Compared with transformers' own tokens by the tests."""

descriptor: Descriptor[ModelFamilyCapabilities] = Descriptor(
    kind=Kind.MODEL_FAMILY,
    name="transformers_seq2seq",
    capabilities=ModelFamilyCapabilities(architectures=Set(ARCHITECTURES), devices=Set(("cpu", "cuda"))),
    factory="slotline.plugins.model_families.seq2seq_model:TransformersSeq2Seq",
    summary="BART, Marian, mBART, NLLB, Pegasus and T5 checkpoints in Hugging Face format: text in, text out",
)
