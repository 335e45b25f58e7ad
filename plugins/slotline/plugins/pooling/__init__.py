"""Descriptor of the extension `pooling`: vectors or a score for each prompt in place of tokens."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="pooling",
    capabilities=ExtensionCapabilities(order=80, inputs=("token_type_ids",)),
    factory="slotline.plugins.pooling.extension:Pooling",
    summary="answers each prompt with vectors that the model's pooler makes of its hidden states",
)
