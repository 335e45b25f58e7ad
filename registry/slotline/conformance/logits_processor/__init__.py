"""Checks of logits_processor plugins; importing this package registers them."""

from __future__ import annotations

from slotline.conformance.logits_processor import contract, form, fuzz, history, params, refusals, rows, speculation

__all__ = ["contract", "form", "fuzz", "history", "params", "refusals", "rows", "speculation"]
