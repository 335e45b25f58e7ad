"""Checks of weight formats. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.weight_format import broken, config_fields, contract, hostile, numerics, online, stateful

__all__ = ["broken", "config_fields", "contract", "hostile", "numerics", "online", "stateful"]
