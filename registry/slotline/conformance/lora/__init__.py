"""Checks of LoRA plugins. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.lora import batches, contract, engine, fuzz, graphs, numerics, refusals, slots

__all__ = ["batches", "contract", "engine", "fuzz", "graphs", "numerics", "refusals", "slots"]
