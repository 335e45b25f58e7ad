"""Texts for response parsers of any form: made of a parser's own markers, of calls that it asks for, and of words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from attrs import define, field

from slotline.registry.contracts import (
    ContentDelta,
    ReasoningDelta,
    ResponseEvent,
    ResponseParserContext,
    ResponseRequest,
    StructuredOutputsParams,
    ToolArgumentsDelta,
    ToolCallBegin,
)
from slotline.testing.check import Failed, NotApplicable
from slotline.testing.subject import Subject

ARGUMENTS = '{"city": "B\\"}]ern", "days": 2}'
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
)
ASKED = ResponseRequest(tools=TOOLS)
REQUIRED = ResponseRequest(tools=TOOLS, tool_choice="required")
_WORDS = ("so ", "x", "\n", " ", "{", "}", '"', "\\", "<", ">", "[", "]", "|", "weather", "<think>", "</think>", "é")
TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"close": "<end>"},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
    },
    "start_anchor": "assistant:",
}


class SomeTokenizer:
    """Stands for the tokenizer: parsers read what it says of answers, not its tokens."""

    response_template = TEMPLATE


def context() -> ResponseParserContext:
    """Return a build context."""
    return ResponseParserContext(
        contract=1, tokenizer=SomeTokenizer(), chat_template="", special_tokens=(), model_type=""
    )


@define
class Said:
    """What the events of an output add up to. Ids may differ between two readings."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(factory=list)
    ids: list[str] = field(factory=list, eq=False)

    def add(self, events: Sequence[ResponseEvent]) -> None:
        """Add events.

        Raises:
            Failed: if one does not follow from those before.
        """
        for event in events:
            if isinstance(event, ReasoningDelta):
                self.reasoning += event.text
            elif isinstance(event, ContentDelta):
                self.content += event.text
            elif isinstance(event, ToolCallBegin):
                if event.index != len(self.calls):
                    raise Failed(f"call {event.index} begins after {len(self.calls)} calls")
                if event.id is not None and event.id in self.ids:
                    raise Failed(f"two calls have the id {event.id!r}")
                self.ids += [] if event.id is None else [event.id]
                self.calls.append([event.name, ""])
            elif isinstance(event, ToolArgumentsDelta):
                if event.index != len(self.calls) - 1:
                    raise Failed(f"arguments of call {event.index} after {len(self.calls)} calls")
                self.calls[-1][1] += event.text
            else:
                raise Failed(f"{event!r:.80} is no event")


def read(parser: Any, parts: Sequence[str], request: ResponseRequest = ASKED) -> Said:
    """Return what the parts of a text say together."""
    stream, said = parser.start(request), Said()
    for part in parts:
        said.add(stream.append(part))
    said.add(stream.finish())
    return said


def required_call(parser: Any, request: ResponseRequest = REQUIRED) -> str:
    """Return a text that the parser's own constraint lets a model write as a call of the function `weather`.

    Raises:
        NotApplicable: if it has no constraint of a form that is known here.
    """
    wanted: StructuredOutputsParams | None = parser.constraint(request)
    if wanted is None or wanted.constraint.kind not in ("json", "structural_tag"):
        raise NotApplicable("it has no constraint for required calls that is a schema or a structural tag")
    given = json.loads(wanted.constraint.text)
    if wanted.constraint.kind == "json":
        return f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]'
    structure = given["structures"][0]
    return f"{structure['begin']}{ARGUMENTS}{structure['end']}"


def some_text(subject: Subject, call: str, rng: Random) -> str:
    """Return a text of markers, words, and pieces of a call."""
    markers = [text for texts in subject.descriptor.capabilities.evidence for text in texts]
    pieces = [*_WORDS, *markers * 2]
    for _ in range(4 if call else 0):
        at = rng.randrange(len(call))
        pieces.append(call[at : at + rng.randrange(1, 30)])
    pieces += [call] * 3
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 12)))


def split(text: str, rng: Random) -> list[str]:
    """Return the text in pieces, some of them empty."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
