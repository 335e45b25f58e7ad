"""A response parser in plain Python: calls as `<call name>arguments</call>`, reasoning in `<think>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slotline.registry.contracts import (
    ContentDelta,
    ReasoningDelta,
    ResponseEvent,
    ResponseParserCapabilities,
    ResponseParserContext,
    ResponseRequest,
    ResponseStream,
    StructuredOutputsParams,
    ToolArgumentsDelta,
    ToolCallBegin,
)
from slotline.registry.descriptor import Descriptor, Kind

_MARKERS = re.compile(r"(<call [^>]+>|</call>|<think>|</think>)")
_CALL = re.compile(r"<call [^>]+>")
_OPEN = re.compile(r"<[^>]*$")


class TaggedStream:
    """Reader that holds back what may be a marker. `inside` is the kind of text that it is in."""

    def __init__(self, request: ResponseRequest) -> None:
        self.request = request
        self.buffer = ""
        self.calls = 0
        self.inside = "reasoning" if request.prompt.rstrip().endswith("<think>") else "content"

    def append(self, text: str) -> Sequence[ResponseEvent]:
        """See the contract."""
        self.buffer += text
        found = self.held()
        ready, self.buffer = self.buffer[:found], self.buffer[found:]
        return self.events(ready)

    def finish(self) -> Sequence[ResponseEvent]:
        """See the contract."""
        ready, self.buffer = self.buffer, ""
        return self.events(ready)

    def held(self) -> int:
        """Return the length of the text before a marker that may have begun."""
        found = _OPEN.search(self.buffer)
        return len(self.buffer) if found is None else found.start()

    def events(self, text: str) -> list[ResponseEvent]:
        """Return what a text without partial markers says."""
        return [event for piece in _MARKERS.split(text) if piece for event in self.of_piece(piece)]

    def of_piece(self, piece: str) -> list[ResponseEvent]:
        """Return what a marker, or a text between two, says."""
        if self.inside == "content" and piece == "<think>":
            self.inside = "reasoning"
        elif self.inside == "reasoning" and piece == "</think>":
            self.inside = "content"
        elif self.inside == "content" and self.request.calls and _CALL.fullmatch(piece):
            self.inside = "call"
            return [self.begin(piece[6:-1])]
        elif self.inside == "call" and piece == "</call>":
            self.inside = "content"
        else:
            return [self.delta(piece)]
        return []

    def begin(self, name: str) -> ToolCallBegin:
        """Return the beginning of the next call."""
        self.calls += 1
        return ToolCallBegin(self.calls - 1, name)

    def delta(self, text: str) -> ResponseEvent:
        """Return text of the kind that the reader is in."""
        if self.inside == "call":
            return ToolArgumentsDelta(self.calls - 1, text)
        return ReasoningDelta(text) if self.inside == "reasoning" else ContentDelta(text)


class TaggedParser:
    """Parser of the form."""

    stream: type[TaggedStream] = TaggedStream

    def __init__(self, context: ResponseParserContext) -> None:
        self.context = context

    def start(self, request: ResponseRequest) -> ResponseStream:
        """See the contract."""
        return self.stream(request)

    def constraint(self, request: ResponseRequest) -> StructuredOutputsParams | None:
        """See the contract."""
        structures = [
            {"begin": f"<call {one['name']}>", "schema": one.get("parameters", {"type": "object"}), "end": "</call>"}
            for one in request.callable_functions
        ]
        tag = {"structures": structures, "triggers": ["<call "], "at_least_one": True}
        return StructuredOutputsParams(structural_tag=tag)

    def reasoning_end(self, request: ResponseRequest) -> str | None:
        """See the contract."""
        return "</think>" if request.prompt.rstrip().endswith("<think>") else None


descriptor = Descriptor(
    kind=Kind.RESPONSE_PARSER,
    name="reference",
    capabilities=ResponseParserCapabilities(evidence=(("<call ", "</call>"),), priority=-1),
    factory=TaggedParser,
    summary="calls between tags, in plain Python",
)
