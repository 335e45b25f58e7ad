"""Checks of kv_spec plugins; importing this package registers them."""

from __future__ import annotations

from slotline.conformance.kv_spec import contract, counts, engine, fuzz, pages, prefixes, refusals, underdeclared

__all__ = ["contract", "counts", "engine", "fuzz", "pages", "prefixes", "refusals", "underdeclared"]
