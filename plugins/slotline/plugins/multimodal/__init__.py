"""Descriptor of the extension `multimodal`: inputs besides text, encoded by the model before a step needs them."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="multimodal",
    capabilities=ExtensionCapabilities(inputs=("features",), order=10),
    factory="slotline.plugins.multimodal.extension:build",
    summary="encodes images, recordings and other items, and puts their embeddings into the steps that need them",
)
