"""Descriptor of the `full` cache spec: every token of a sequence stays in the cache until the request ends."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="full",
    capabilities=KVSpecCapabilities(
        # A window or a chunk only hides keys from a query, so a cache that keeps them all is right, but wasteful.
        kv_kinds=Set(("full", "sliding", "chunked")),
        exact_kinds=Set(("full",)),
        page_stride=Flag(True),
    ),
    factory="slotline.plugins.kv_specs.full_cache:FullSpec",
    summary="keeps the keys and values of every token",
)
