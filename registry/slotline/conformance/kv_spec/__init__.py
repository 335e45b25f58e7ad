"""Checks of kv_spec plugins. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.kv_spec import (
    contract,
    counts,
    engine,
    fuzz,
    pages,
    prefixes,
    refusals,
    state_engine,
    state_hits,
    state_memory,
    state_places,
    state_traffic,
    tensors,
    underdeclared,
)

__all__ = [
    "contract",
    "counts",
    "engine",
    "fuzz",
    "pages",
    "prefixes",
    "refusals",
    "state_engine",
    "state_hits",
    "state_memory",
    "state_places",
    "state_traffic",
    "tensors",
    "underdeclared",
]
