"""Descriptor of the `dsa` cache spec: a latent of every token, and the key of an index that picks among them."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.cache_tensors import LATENT_INDEX
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="dsa",
    capabilities=KVSpecCapabilities(
        kv_kinds=Set(("dsa",)),
        exact_kinds=Set(("dsa",)),
        page_stride=Flag(True),
        formats=Set((LATENT_INDEX,)),
    ),
    factory="slotline.plugins.kv_specs.dsa_cache:IndexedLatentSpec",
    summary="keeps a latent of every token, and the key of an index that picks among them",
)
