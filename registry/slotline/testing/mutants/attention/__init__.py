"""Broken attention backends by topic, and right ones whose arithmetic differs."""

from __future__ import annotations

from slotline.testing.mutants.attention import arithmetic, contract, masks, outputs, paging, plans
from slotline.testing.mutants.attention.correct import CORRECT

MUTANTS = (
    *contract.MUTANTS,
    *masks.MUTANTS,
    *arithmetic.MUTANTS,
    *paging.MUTANTS,
    *outputs.MUTANTS,
    *plans.MUTANTS,
)

__all__ = ["CORRECT", "MUTANTS"]
