"""A structured-output plugin for tests that compiles when it is let, and fails where a choice's text says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import evolve

from slotline.registry.contracts import Constraint, GrammarState, StructuredOutputContext
from slotline.registry.errors import RequestError
from slotline.testing.reference import structured_output as reference


class Wayward(reference.ChoiceBackend):
    """Choices, one of which may tell it to go wrong; `gates` by text hold compiling back."""

    descriptor = evolve(reference.descriptor, name="wayward", factory=None)

    def __init__(self, context: StructuredOutputContext) -> None:
        super().__init__(context)
        self.gates: dict[str, threading.Event] = {}
        self.compiled: list[str] = []
        self.checked: list[str] = []

    def check(self, constraint: Constraint) -> None:
        self.checked.append(constraint.text)
        if "no check" in constraint.text:
            raise ValueError("cannot check")
        super().check(constraint)

    def compile(self, constraint: Constraint) -> tuple[bytes, ...]:
        self.compiled.append(constraint.text)
        for text, gate in self.gates.items():
            if text in constraint.text:
                assert gate.wait(60)
        if "uncompilable" in constraint.text:
            raise RequestError("line 1, column 7: too hard", fix="make it easier")
        return tuple(text.encode() for text in json.loads(constraint.text))

    def start(self, grammar: tuple[bytes, ...]) -> GrammarState:
        if b"no start" in grammar:
            raise ValueError("cannot start")
        return super().start(grammar)

    def fill(
        self,
        states: Sequence[reference.ChoiceState],
        drafts: Sequence[Sequence[int]],
        places: Sequence[int],
        bitmask: npt.NDArray[np.int32],
    ) -> None:
        for state in states:
            if any(b"no mask" in choice for choice in state.left):
                bitmask[:] = 0  # what was done to the others before must not stay
                raise ValueError("cannot fill")
        super().fill(states, drafts, places, bitmask)

    def write(self, state: reference.ChoiceState, words: npt.NDArray[np.int32]) -> None:
        if not any(b"all ones" in choice for choice in state.left):
            super().write(state, words)


class Unbuildable(Wayward):
    """Cannot be built."""

    descriptor = evolve(
        Wayward.descriptor, name="unbuildable", capabilities=evolve(Wayward.descriptor.capabilities, priority=99)
    )

    def __init__(self, context: StructuredOutputContext) -> None:
        raise ValueError("no such vocabulary")
