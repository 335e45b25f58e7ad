"""Descriptor of the `full_bounds` cache spec: every token's keys and values, and bounds of each block's keys."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.cache_tensors import KEY_BOUNDS
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="full_bounds",
    capabilities=KVSpecCapabilities(
        kv_kinds=Set(("full",)),
        exact_kinds=Set(("full",)),
        page_stride=Flag(True),
        formats=Set((KEY_BOUNDS,)),
    ),
    factory="slotline.plugins.kv_specs.bounds:FullBounds",
    summary="keeps the keys and values of every token, and the bounds of each block's keys",
)
