"""Broken devices, one bug each, and right ones that differ."""

from __future__ import annotations

from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.device import buffers, graphs, machine, operations, sampling
from slotline.testing.reference import device as reference

MUTANTS: tuple[Mutant, ...] = (*machine.ALL, *buffers.ALL, *operations.ALL, *sampling.ALL, *graphs.ALL)

CORRECT: tuple[Correct, ...] = (
    Correct("torch's operations, and uploads that are copied", reference.descriptor),
    Correct("operations of its own, draws row by row, repeated steps, recorded graphs", reference.recorded),
)
