"""Construction of a mutant from a class."""

from __future__ import annotations

from slotline.registry.capability import Set
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.reference.state import ReferenceState, descriptor_of

FLOAT32 = Set({("float32", "float32")})


def mutant(name: str, backend: type[ReferenceState], level: Level, *kinds: str) -> Mutant:
    """Return a mutant of some kinds of layers, in float32. Its summary is the class's docstring."""
    summary = (backend.__doc__ or "").strip()
    return Mutant(name, summary, level, descriptor_of(f"mutant_{name}", backend, kinds, dtypes=FLOAT32))
