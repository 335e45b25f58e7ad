"""Checks of experts plugins. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.experts import contract, hostile, numerics, stateful

__all__ = ["contract", "hostile", "numerics", "stateful"]
