"""Descriptor of the `full_quantized` cache spec: every token's keys and values as codes with scales."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="full_quantized",
    capabilities=KVSpecCapabilities(
        kv_kinds=Set(("full", "sliding", "chunked")),
        exact_kinds=Set(("full",)),
        page_stride=Flag(True),
        formats=Set(FORMAT_DTYPES),
    ),
    factory="slotline.plugins.kv_specs.quantized:FullQuantized",
    summary="keeps codes and scales of the keys and values of every token",
)
