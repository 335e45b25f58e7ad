"""Checks of logits_processor plugins. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.logits_processor import (
    companions,
    contract,
    floors,
    form,
    fuzz,
    history,
    params,
    refusals,
    rows,
    speculation,
    values,
)

__all__ = [
    "companions",
    "contract",
    "floors",
    "form",
    "fuzz",
    "history",
    "params",
    "refusals",
    "rows",
    "speculation",
    "values",
]
