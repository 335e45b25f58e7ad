"""Checks of structured-output plugins. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.structured_output import contract, engine, fuzz, hostile, masks, refusals

__all__ = ["contract", "engine", "fuzz", "hostile", "masks", "refusals"]
