"""State backends with one bug each, and two right ones.

A mutant declares only the kind of layer that it gets wrong, and float32, so that it is found fast.
"""

from __future__ import annotations

from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.state import arithmetic, bookkeeping, sizes, speculation
from slotline.testing.reference.state import chunked_descriptor, descriptor

MUTANTS: tuple[Mutant, ...] = (*arithmetic.MUTANTS, *bookkeeping.MUTANTS, *speculation.MUTANTS, *sizes.MUTANTS)

CORRECT: tuple[Correct, ...] = (
    Correct("token by token; rolls back to kept states", descriptor),
    Correct("by chunks, with matrix products and a parallel scan; rolls back by replaying", chunked_descriptor),
)
