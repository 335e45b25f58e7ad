"""Descriptor of the `mla` cache spec: one latent a token for all heads, in place of keys and values."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="mla",
    capabilities=KVSpecCapabilities(kv_kinds=Set(("mla",)), exact_kinds=Set(("mla",)), page_stride=Flag(True)),
    factory="slotline.plugins.kv_specs.mla_cache:MLASpec",
    summary="keeps one latent of every token, which is key and value of all heads",
)
