"""Descriptor of the extension `block_events`: plugins hear of blocks that change hands."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="block_events",
    capabilities=ExtensionCapabilities(order=1000, needs_caches=True),  # after what fills blocks
    factory="slotline.plugins.block_events.extension:BlockEventsExtension",
    summary="tells plugins before each step which blocks were given, returned, restored and loaded",
)
