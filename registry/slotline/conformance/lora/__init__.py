"""Checks of LoRA plugins. Importing this package registers them."""

from __future__ import annotations

from slotline.conformance.lora import (
    batches,
    contract,
    engine,
    fuzz,
    graphs,
    numerics,
    peft_fields,
    refusals,
    sizes,
    slots,
)

__all__ = ["batches", "contract", "engine", "fuzz", "graphs", "numerics", "peft_fields", "refusals", "sizes", "slots"]
