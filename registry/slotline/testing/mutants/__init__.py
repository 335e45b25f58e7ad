"""Plugins that are wrong on purpose, one bug each: the proof that the suite sees what it claims to see.

Each kind has a module here with `MUTANTS`, and with `CORRECT`, implementations that differ in arithmetic but are right.
The suite's own acceptance test holds that every mutant is killed by a mandatory check at the level it states, and that
no correct one fails anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing.check import Level

_MODULES: Mapping[Kind, str] = MappingProxyType({kind: f"slotline.testing.mutants.{kind.value}" for kind in Kind})


@frozen
class Mutant:
    """Broken plugin.

    Attributes:
        name: name of the bug in a few hyphenated words, unique within the kind.
        summary: description of the bug in a sentence.
        level: the lowest level that can see it. A mandatory check of this level must kill it.
        descriptor: descriptor of the plugin.
    """

    name: str
    summary: str
    level: Level
    descriptor: Descriptor[Any]

    @property
    def kind(self) -> Kind:
        return self.descriptor.kind


@frozen
class Correct:
    """Correct implementation: its descriptor, and its difference from the others."""

    summary: str
    descriptor: Descriptor[Any]


def all_mutants(kind: Kind | None = None) -> tuple[Mutant, ...]:
    """Return the mutants of a kind, or of all kinds."""
    return tuple(mutant for module in _modules(kind) for mutant in module.MUTANTS)


def all_correct(kind: Kind | None = None) -> tuple[Correct, ...]:
    """Return the correct implementations of a kind, or of all kinds."""
    return tuple(right for module in _modules(kind) for right in module.CORRECT)


def _modules(kind: Kind | None) -> list[Any]:
    return [importlib.import_module(name) for key, name in _MODULES.items() if kind in (None, key)]
