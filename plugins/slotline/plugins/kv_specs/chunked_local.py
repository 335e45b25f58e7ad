"""Descriptor of the `chunked_local` cache spec: a finished chunk goes back to the pool while the request runs."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="chunked_local",
    capabilities=KVSpecCapabilities(kv_kinds=Set(("chunked",)), exact_kinds=Set(("chunked",)), page_stride=Flag(True)),
    factory="slotline.plugins.kv_specs.local_cache:ChunkedLocalSpec",
    summary="keeps the keys and values of the chunk that a request is in",
)
