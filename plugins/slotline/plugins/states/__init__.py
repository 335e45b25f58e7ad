"""Descriptor of the extension `states`: layers that keep a state for each request instead of keys and values."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="states",
    capabilities=ExtensionCapabilities(order=30),
    factory="slotline.plugins.states.extension:StateLayers",
    summary="runs layers that keep a state for each request, and keeps copies of states where prefixes end",
)
