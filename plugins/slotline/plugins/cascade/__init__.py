"""Descriptor of the extension `cascade`: prefixes that requests of a step share are attended to once."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="cascade",
    capabilities=ExtensionCapabilities(order=90),
    factory="slotline.plugins.cascade.extension:CascadeExtension",
    summary="finds the prefixes that requests of a step share, for backends that attend to them once",
)
