"""Descriptor of the extension `prefix_waits`: a prefix that requests share is computed once."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="prefix_waits",
    capabilities=ExtensionCapabilities(order=5, needs_caches=True),  # before anything is taken for a request
    factory="slotline.plugins.prefix_waits.extension:PrefixWaits",
    summary="lets new requests wait while a running one computes the prefix that they share with it",
)
