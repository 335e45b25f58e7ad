"""Checks of drafter plugins. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.drafter import (
    config_fields,
    contract,
    edges,
    engine,
    form,
    fuzz,
    independence,
    probabilities,
    refusals,
    steps,
)

__all__ = [
    "config_fields",
    "contract",
    "edges",
    "engine",
    "form",
    "fuzz",
    "independence",
    "probabilities",
    "refusals",
    "steps",
]
