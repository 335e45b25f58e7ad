"""The machine that all readers share: states that take text from a buffer as soon as its meaning is certain."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from slotline.registry.contracts import (
    ContentDelta,
    ReasoningDelta,
    ResponseEvent,
    ResponseRequest,
    ToolArgumentsDelta,
    ToolCallBegin,
)

Emit = Callable[[str], None]
_OPENING, _CLOSING = "{[", "}]"


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return the length of the text before an end that may be the beginning of a marker."""
    longest = max(map(len, markers), default=1)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)


def merged(events: Sequence[ResponseEvent]) -> list[ResponseEvent]:
    """Return the events with neighbouring deltas of one kind put together."""
    found: list[ResponseEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, ToolArgumentsDelta) and isinstance(last, ToolArgumentsDelta) and last.index == event.index:
            found[-1] = ToolArgumentsDelta(event.index, last.text + event.text)
        elif isinstance(event, ContentDelta | ReasoningDelta) and type(event) is type(last):
            found[-1] = type(event)(last.text + event.text)
        else:
            found.append(event)
    return found


class Reader:
    """Reader of one output whose reasoning, if there is any, stands before its content between two markers.

    A state is a method. It takes from `buffer` what it understands, and returns True if it should go on at once. What
    it takes hangs on the text alone and not on where it was split.

    Args:
        think: the markers around the reasoning, None for a form without.

    Attributes:
        buffer: text that was not understood yet.
        final: whether no more text comes.
        fresh: whether white space is skipped, since a marker came before it.
        calls: the number of tool calls so far.
    """

    def __init__(self, request: ResponseRequest, think: tuple[str, str] | None = None) -> None:
        self.request = request
        self.buffer = ""
        self.final = False
        self.fresh = False
        self.calls = 0
        self._think = think
        self._events: list[ResponseEvent] = []
        self._in_string = False
        self._depth = 0
        self._ids: set[str | None] = set()
        self.state: Callable[[], bool] = self.content
        if think is not None:
            inside = request.prompt.rstrip().endswith(think[0])
            self.state, self.fresh = (self.reasoning, True) if inside else (self.opening, False)

    def append(self, text: str) -> Sequence[ResponseEvent]:
        """See the contract."""
        self.buffer += text
        return self._run()

    def finish(self) -> Sequence[ResponseEvent]:
        """See the contract."""
        self.final = True
        return self._run()

    def _run(self) -> Sequence[ResponseEvent]:
        while self.state():
            pass
        events, self._events = self._events, []
        return merged(events)

    # States

    def opening(self) -> bool:
        """Wait until it is certain whether the text begins with reasoning."""
        assert self._think is not None
        text, begin = self.buffer.lstrip(), self._think[0]
        if text.startswith(begin):
            self.buffer, self.fresh = text[len(begin) :], True
            return self.go(self.reasoning)
        if begin.startswith(text) and not self.final:
            return False
        return self.go(self.content)

    def reasoning(self) -> bool:
        """Pass on reasoning until its end."""
        assert self._think is not None
        if self.until((self._think[1],), self.reason) is None:
            return False
        return self.go(self.content)

    def content(self) -> bool:
        """Pass on content. Forms with calls look for their markers in it."""
        self.until((), self.say)
        return False

    def drop_until(self, marker: str, following: Callable[[], bool]) -> Callable[[], bool]:
        """Return a state that drops everything up to a marker."""

        def state() -> bool:
            return self.until((marker,), lambda _: None) is not None and self.go(following)

        return state

    # Means

    def go(self, state: Callable[[], bool]) -> bool:
        """Go on with another state."""
        self.state = state
        return True

    def until(self, markers: Sequence[str], emit: Emit) -> str | None:
        """Pass on the text before the first of some markers, and take the marker.

        White space before a marker is dropped, and after one if `fresh`. None if there is no marker yet.
        """
        if self.fresh:
            self.buffer = self.buffer.lstrip()
        places = [(self.buffer.find(marker), marker) for marker in markers if marker in self.buffer]
        at, marker = min(places, default=(-1, ""))
        if places:
            text, self.buffer, self.fresh = self.buffer[:at].rstrip(), self.buffer[at + len(marker) :], True
        else:
            end = len(self.buffer) if self.final else held_back(self.buffer, markers)
            text = self.buffer[:end] if self.final else self.buffer[:end].rstrip()
            self.buffer = self.buffer[len(text) :]
            self.fresh = self.fresh and not text
        if text:
            emit(text)
        return marker if places else None

    def say(self, text: str) -> None:
        """Add content."""
        self._events.append(ContentDelta(text))

    def reason(self, text: str) -> None:
        """Add reasoning."""
        self._events.append(ReasoningDelta(text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. An id that the output has used already is left out."""
        own = None if call_id in self._ids else call_id
        self._ids.add(call_id)
        self._events.append(ToolCallBegin(self.calls, name, own))
        self.calls += 1

    def argue(self, text: str) -> None:
        """Add to the arguments of the last call."""
        if text:
            self._events.append(ToolArgumentsDelta(self.calls - 1, text))

    def take_object(self, stops: Sequence[str] = ()) -> bool:
        """Pass on the characters of a JSON object as arguments. Return True at its end, or before a stop outside text.

        The buffer begins with the object or goes on with it.
        """
        text, at, over = self.buffer, 0, False
        special = re.compile("[" + re.escape('"{}[]' + "".join({stop[0] for stop in stops})) + "]")
        while at < len(text) and not over:
            found = (_IN_STRING if self._in_string else special).search(text, at)
            if found is None:
                at = len(text)
                break
            at, char = found.start(), found[0]
            if self._in_string:
                if char == "\\" and at + 1 == len(text) and not self.final:
                    break
                self._in_string, at = char != '"', at + (2 if char == "\\" else 1)
            elif any(text.startswith(stop, at) for stop in stops):
                over, self._depth = True, 0
            elif not self.final and any(stop.startswith(text[at:]) for stop in stops):
                break
            else:
                self._in_string = char == '"'
                self._depth += (char in _OPENING) - (char in _CLOSING)
                at += 1
                over = self._depth == 0 and char in _CLOSING
        self.argue(text[:at])
        self.buffer = text[at:]
        return over

    def whole_call(self, text: str) -> bool:
        """Take a call, or a list of calls, that is a whole JSON document. Return False if it is none."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return False
        found = found if isinstance(found, list) else [found]
        if not found or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in found):
            return False
        for one in found:
            self.begin(one["name"])
            self.argue(as_arguments(one.get("arguments", one.get("parameters"))))
        return True


_IN_STRING = re.compile(r'["\\]')
HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
"""Beginning of a call as a JSON object whose name comes first, up to the object of its arguments."""


def unescaped(text: str) -> str:
    """Return what the inside of a JSON string says, or itself if it is none."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def as_arguments(value: Any) -> str:
    """Return arguments as JSON text. A text stays as it is, nothing is an empty object."""
    if value is None:
        return "{}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
