"""Response parsers with one fault each, and right ones that differ from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from slotline.registry.contracts import (
    ContentDelta,
    ResponseEvent,
    ResponseRequest,
    ResponseStream,
    ToolArgumentsDelta,
    ToolCallBegin,
)
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference.response_parser import TaggedParser, TaggedStream, descriptor


def _reading(stream: type[TaggedStream]) -> type[TaggedParser]:
    """Return the reference with another reader."""
    return type(stream.__name__, (TaggedParser,), {"stream": stream})


def _mutant(name: str, what: str, level: Level, factory: type, **changes: Any) -> Mutant:
    return Mutant(name, what, level, attrs.evolve(descriptor, name=name, factory=factory, **changes))


class HoldsNothing(TaggedStream):
    """Passes partial markers on."""

    def held(self) -> int:
        return len(self.buffer)


class LosesTheEnd(TaggedStream):
    """Forgets what was held back."""

    def finish(self) -> Sequence[ResponseEvent]:
        return []


class StripsPieces(TaggedStream):
    """Strips white space from each piece that it gets."""

    def append(self, text: str) -> Sequence[ResponseEvent]:
        return super().append(text.strip(" "))


class SameIndex(TaggedStream):
    """Numbers every call 0."""

    def begin(self, name: str) -> ToolCallBegin:
        self.calls = 1
        return ToolCallBegin(0, name)


class SameId(TaggedStream):
    """Gives every call the same id."""

    def begin(self, name: str) -> ToolCallBegin:
        return attrs.evolve(super().begin(name), id="call_0")


class ArgumentsBefore(TaggedStream):
    """Says the arguments of a call that has not begun."""

    def delta(self, text: str) -> ResponseEvent:
        found = super().delta(text)
        return attrs.evolve(found, index=found.index + 1) if isinstance(found, ToolArgumentsDelta) else found


class CallsAreContent(TaggedStream):
    """Takes calls for content."""

    def of_piece(self, piece: str) -> list[ResponseEvent]:
        return [ContentDelta(piece)]


class DropsContentBeforeCalls(TaggedStream):
    """Shows no content in a text with calls."""

    def events(self, text: str) -> list[ResponseEvent]:
        found = super().events(text)
        calls = any(isinstance(event, ToolCallBegin) for event in found)
        return [event for event in found if not (calls and isinstance(event, ContentDelta))]


class OneReader(TaggedParser):
    """Has one buffer for all outputs that have not ended."""

    def start(self, request: ResponseRequest) -> ResponseStream:
        found = super().start(request)
        shared = self.__dict__.setdefault("shared", found)
        if found is not shared:
            found.__dict__ = shared.__dict__
        shared.__init__(request)
        return found


MUTANTS = (
    _mutant("holds-nothing", "partial markers are passed on", Level.HOSTILE, _reading(HoldsNothing)),
    _mutant("loses-the-end", "what was held back is lost", Level.NUMERICS, _reading(LosesTheEnd)),
    _mutant("strips-pieces", "white space at a piece's ends is lost", Level.NUMERICS, _reading(StripsPieces)),
    _mutant("same-index", "every call is number 0", Level.HOSTILE, _reading(SameIndex)),
    _mutant("same-id", "every call has the same id", Level.HOSTILE, _reading(SameId)),
    _mutant("arguments-before", "arguments of a call to come", Level.NUMERICS, _reading(ArgumentsBefore)),
    _mutant("calls-are-content", "calls are content", Level.NUMERICS, _reading(CallsAreContent)),
    _mutant("content-or-calls", "content beside calls is lost", Level.HOSTILE, _reading(DropsContentBeforeCalls)),
    _mutant("one-reader", "one buffer for all outputs", Level.HOSTILE, OneReader),
)


class LetterByLetter(TaggedStream):
    """Gives each letter an event of its own."""

    def of_piece(self, piece: str) -> list[ResponseEvent]:
        found = super().of_piece(piece)
        if not found or isinstance(found[0], ToolCallBegin):
            return found
        return [self.delta(letter) for letter in piece]


CORRECT = (
    Correct("calls between tags in plain Python", descriptor),
    Correct("the same letter by letter", attrs.evolve(descriptor, name="letters", factory=_reading(LetterByLetter))),
)
