"""Broken devices, one bug each, and right ones that differ."""

from __future__ import annotations

from slotline.testing.mutants import Correct
from slotline.testing.reference import device as reference

MUTANTS = ()
CORRECT: tuple[Correct, ...] = (
    Correct("torch's operations, and uploads that are copied", reference.descriptor),
    Correct("operations of its own, draws row by row, repeated steps, recorded graphs", reference.recorded),
)
