"""Encoders of transformers, whose tokens see each other in both directions. This module does not import torch."""

from __future__ import annotations

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts.model_family import ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor, Kind

EMBEDDERS: tuple[str, ...] = (
    "BertModel",
    "CamembertModel",
    "DistilBertModel",
    "ModernBertModel",
    "RobertaModel",
    "XLMRobertaModel",
)
"""Every one is compared with transformers' own hidden states by the tests."""

CLASSIFIERS: tuple[str, ...] = (
    "BertForSequenceClassification",
    "CamembertForSequenceClassification",
    "DistilBertForSequenceClassification",
    "ModernBertForSequenceClassification",
    "RobertaForSequenceClassification",
    "XLMRobertaForSequenceClassification",
)
"""The same encoders with a head over the first token, or the mean of all."""

TAGGERS: tuple[str, ...] = (
    "BertForTokenClassification",
    "CamembertForTokenClassification",
    "DistilBertForTokenClassification",
    "ModernBertForTokenClassification",
    "RobertaForTokenClassification",
    "XLMRobertaForTokenClassification",
)
"""The same encoders with a head over each token."""

ARCHITECTURES = (*EMBEDDERS, *CLASSIFIERS, *TAGGERS)

descriptor: Descriptor[ModelFamilyCapabilities] = Descriptor(
    kind=Kind.MODEL_FAMILY,
    name="transformers_encoder",
    capabilities=ModelFamilyCapabilities(
        architectures=Set(ARCHITECTURES),
        devices=Set(("cpu", "cuda")),
        tasks=Set(("embed", "classify", "token_classify")),
        tensor=Max(),
        token_types=Flag(True),
    ),
    factory="slotline.plugins.model_families.encoder_model:TransformersEncoder",
    options="slotline.plugins.model_families.decoder:DecoderOptions",
    summary="bidirectional encoders in Hugging Face format, for embeddings and class scores",
)
