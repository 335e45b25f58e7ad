"""Descriptor of the `sliding` cache spec: what the window has left goes back to the pool while the request runs."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="sliding",
    capabilities=KVSpecCapabilities(kv_kinds=Set(("sliding",)), exact_kinds=Set(("sliding",)), page_stride=Flag(True)),
    factory="slotline.plugins.kv_specs.local_cache:SlidingSpec",
    summary="keeps the keys and values of the last window",
)
