"""Descriptor of the `sliding_quantized` cache spec: codes with scales of the last window."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="sliding_quantized",
    capabilities=KVSpecCapabilities(
        kv_kinds=Set(("sliding",)),
        exact_kinds=Set(("sliding",)),
        page_stride=Flag(True),
        formats=Set(FORMAT_DTYPES),
    ),
    factory="slotline.plugins.kv_specs.quantized:SlidingQuantized",
    summary="keeps codes and scales of the keys and values of the last window",
)
