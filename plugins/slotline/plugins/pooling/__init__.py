"""Descriptor of the extension `pooling`: one vector for each prompt in place of tokens."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="pooling",
    capabilities=ExtensionCapabilities(order=80),
    factory="slotline.plugins.pooling.extension:Pooling",
    summary="answers each prompt with a vector that the model's pooler makes of its hidden states",
)
