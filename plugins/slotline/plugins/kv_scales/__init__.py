"""Descriptor of the extension `kv_scales`: scales of the keys and values of an eight-bit cache."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="kv_scales",
    capabilities=ExtensionCapabilities(order=95),
    factory="slotline.plugins.kv_scales.extension:KVScaling",
    summary="scales keys and values of an eight-bit cache, by the checkpoint or by the first step",
)
