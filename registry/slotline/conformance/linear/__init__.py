"""Checks of linear plugins. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.linear import contract, engine, hostile, numerics, stateful

__all__ = ["contract", "engine", "hostile", "numerics", "stateful"]
