"""Checks of weight formats. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.weight_format import broken, contract, hostile, numerics, online, stateful

__all__ = ["broken", "contract", "hostile", "numerics", "online", "stateful"]
