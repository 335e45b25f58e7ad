"""Descriptor of the extension `microbatches`: a step's forward pass in pieces, one after the other."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="microbatches",
    capabilities=ExtensionCapabilities(order=95),
    factory="slotline.plugins.microbatches.extension:MicrobatchesExtension",
    summary="cuts the forward pass of large steps into pieces, so that pipeline stages overlap",
)
