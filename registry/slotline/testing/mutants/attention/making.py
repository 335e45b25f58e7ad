"""Construction of attention mutants: a class that differs from a correct one in one place, with the same descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from slotline.registry.descriptor import Descriptor
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.reference.attention import descriptor as reference


def offer(name: str, summary: str, factory: Callable[..., Any], **changes: Any) -> Descriptor[Any]:
    """Return the reference's descriptor with another name and factory. `changes` are changes of its capabilities."""
    capabilities = evolve(reference.capabilities, **changes)
    return evolve(reference, name=name, summary=summary, factory=factory, capabilities=capabilities)


def mutant(name: str, level: Level, summary: str, factory: Callable[..., Any], **changes: Any) -> Mutant:
    """Return a mutant with the reference's descriptor (see `offer`)."""
    return Mutant(name, summary, level, offer(name, summary, factory, **changes))
