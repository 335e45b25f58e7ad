"""Calls in fences, as Markdown writes code: a line ```call NAME, the arguments in JSON, a line ```."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slotline.registry.contracts import (
    ContentDelta,
    ResponseEvent,
    ResponseParserContext,
    ResponseRequest,
    StructuredOutputsParams,
    ToolArgumentsDelta,
    ToolCallBegin,
)

BEGIN, MAYBE_BEGIN = re.compile(r"```call ([\w.-]+)\n"), re.compile(r"(`{1,3}|```(c|ca|cal|call|call [\w.-]*))$")
END, MAYBE_END = re.compile(r"\n```"), re.compile(r"\n`{0,2}$")


class FenceReader:
    """Reader of one output. JSON has no line of its own that begins with a fence, so the first one ends a call."""

    def __init__(self, request: ResponseRequest) -> None:
        self._calls, self._inside, self._tools, self._text = 0, False, request.calls, ""

    def append(self, text: str) -> Sequence[ResponseEvent]:
        self._text += text
        if not self._tools:
            return self._taken(len(self._text))
        events: list[ResponseEvent] = []
        while found := (END if self._inside else BEGIN).search(self._text):
            events += self._taken(found.start())
            self._text = self._text[len(found[0]) :]
            self._inside = not self._inside
            if self._inside:
                events.append(ToolCallBegin(self._calls, found[1]))
                self._calls += 1
        maybe = (MAYBE_END if self._inside else MAYBE_BEGIN).search(self._text)
        return events + self._taken(len(self._text) if maybe is None else maybe.start())

    def finish(self) -> Sequence[ResponseEvent]:
        return self._taken(len(self._text))

    def _taken(self, end: int) -> list[ResponseEvent]:
        text, self._text = self._text[:end], self._text[end:]
        if not text:
            return []
        return [ToolArgumentsDelta(self._calls - 1, text) if self._inside else ContentDelta(text)]


class FenceParser:
    """Parser of the form. See `slotline.registry.contracts.ResponseParser`."""

    def __init__(self, context: ResponseParserContext) -> None:
        self._context = context

    def start(self, request: ResponseRequest) -> FenceReader:
        return FenceReader(request)

    def constraint(self, request: ResponseRequest) -> StructuredOutputsParams | None:
        structures = [
            {"begin": f"```call {one['name']}\n", "schema": one.get("parameters", {"type": "object"}), "end": "\n```"}
            for one in request.callable_functions
        ]
        tag = {"structures": structures, "triggers": ["```call "], "at_least_one": True}
        return StructuredOutputsParams(structural_tag=tag)

    def reasoning_end(self, request: ResponseRequest) -> str | None:
        return None
