"""Descriptor of the `cross_attention` cache spec: an encoder's keys and values, as long as a request runs."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="cross_attention",
    capabilities=KVSpecCapabilities(
        kv_kinds=Set(("cross",)),
        exact_kinds=Set(("cross",)),
        prefix_caching=Flag(
            False, "an encoder's keys are stored in a request's first step, which a shared prefix skips"
        ),
        page_stride=Flag(True),
    ),
    factory="slotline.plugins.kv_specs.cross_cache:CrossSpec",
    summary="keeps the keys and values that cross-attention reads of an encoder",
)
