"""Checks of expert placements. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.expert_placement import contract, fuzz, hostile, placements

__all__ = ["contract", "fuzz", "hostile", "placements"]
