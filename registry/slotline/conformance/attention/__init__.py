"""Checks of attention plugins. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.attention import (
    approximate,
    bounds,
    cascade,
    contract,
    engine,
    extra,
    features,
    formats,
    graphs,
    hostile,
    mla,
    needles,
    numerics,
    refusals,
    reuse,
    scales,
    sizes,
    stateful,
    underdeclared,
    writes,
)

__all__ = [
    "approximate",
    "bounds",
    "cascade",
    "contract",
    "engine",
    "extra",
    "features",
    "formats",
    "graphs",
    "hostile",
    "mla",
    "needles",
    "numerics",
    "refusals",
    "reuse",
    "scales",
    "sizes",
    "stateful",
    "underdeclared",
    "writes",
]
