"""Descriptor of the extension `context_shards`: the keys of one request over several devices."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="context_shards",
    capabilities=ExtensionCapabilities(order=90),
    factory="slotline.plugins.context_shards.extension:ContextShardsExtension",
    summary="spreads the keys of each request over several devices and merges what each attends to",
)
