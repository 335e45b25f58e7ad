"""Descriptor of the extension `kv_transfer`: blocks of the cache that a KV connector saves and loads."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="kv_transfer",
    capabilities=ExtensionCapabilities(order=70, needs_caches=True, inputs=("kv_transfer_params",)),
    factory="slotline.plugins.kv_transfer.arrivals:build_extension",
    summary="saves full or evicted blocks to a KV connector and loads those of prefixes from it",
)
