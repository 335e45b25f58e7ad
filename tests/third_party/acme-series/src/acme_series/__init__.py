"""Acme's classifiers of time series. This module does not import torch."""

from slotline.registry.capability import Set
from slotline.registry.contracts import ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor: Descriptor[ModelFamilyCapabilities] = Descriptor(
    kind=Kind.MODEL_FAMILY,
    name="acme_series",
    capabilities=ModelFamilyCapabilities(architectures=Set(("AcmeSeriesClassifier",)), tasks=Set(("classify",))),
    factory="acme_series.family:SeriesFamily",
    summary="classifies time series, without tokens",
)
