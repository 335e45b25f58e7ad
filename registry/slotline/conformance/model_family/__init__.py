"""Checks of model families. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.model_family import (
    broken,
    contract,
    engine,
    facts,
    hostile,
    items,
    numerics,
    reload,
    stateful,
    steps,
    weights,
)

__all__ = [
    "broken",
    "contract",
    "engine",
    "facts",
    "hostile",
    "items",
    "numerics",
    "reload",
    "stateful",
    "steps",
    "weights",
]
