"""Checks of attention plugins; importing this package registers them."""

from __future__ import annotations

from slotline.conformance.attention import (
    contract,
    engine,
    extra,
    features,
    graphs,
    hostile,
    needles,
    numerics,
    refusals,
    reuse,
    stateful,
    underdeclared,
    writes,
)

__all__ = [
    "contract",
    "engine",
    "extra",
    "features",
    "graphs",
    "hostile",
    "needles",
    "numerics",
    "refusals",
    "reuse",
    "stateful",
    "underdeclared",
    "writes",
]
