"""The response-parser contract, version 1 (provisional): from the text of an answer to reasoning, content, tool calls.

A plugin knows the form in which a family of models writes its reasoning and its tool calls. It reads the text of one
output piece by piece, with its special tokens, and says what each piece means. It sees no tokens and no logits.

What the events of an output add up to does not depend on where its text was split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from slotline.registry.capability import Set
from slotline.registry.contracts.structured_output import StructuredOutputsParams
from slotline.registry.declared import declared

TOOL_CHOICES = ("auto", "none", "required", "named")
"""What a request says about calls: the model decides, none, at least one, or exactly one of a named function."""


@frozen
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@frozen
class ContentDelta:
    """More of the content, which is the answer for its reader."""

    text: str


@frozen
class ToolCallBegin:
    """Beginning of a tool call.

    Attributes:
        index: the number of the call in the output, from 0 on without gaps.
        name: of the function, also if no tool has this name.
        id: of the call, if the model wrote one. None to have one made.
    """

    index: int
    name: str
    id: str | None = None


@frozen
class ToolArgumentsDelta:
    """More of the arguments of the call `index`, as JSON text, or as the model wrote them if that is no JSON."""

    index: int
    text: str


ResponseEvent = ReasoningDelta | ContentDelta | ToolCallBegin | ToolArgumentsDelta
"""A part of what a text means."""


@frozen(kw_only=True, field_transformer=declared)
class ResponseParserCapabilities:
    """Capabilities that a response parser declares.

    Attributes:
        evidence: alternatives, each of which is a list of texts. A checkpoint gives evidence for the parser if its chat
            template and its special tokens hold all texts of an alternative. Empty if it is only used by name.
        model_types: the `model_type` of checkpoints, in config.json, that give evidence for it by themselves.
        needs_template: whether the tokenizer must have a `response_template`, which is evidence as well.
        tools: whether it reads tool calls.
        reasoning: whether it reads reasoning.
        priority: ``auto`` takes the parser with the highest one among those for which there is evidence.
        devices: device types. Parsers read text, so most support any device.
        priority_reason: gives the reason.
    """

    evidence: tuple[tuple[str, ...], ...] = ()
    model_types: tuple[str, ...] = ()
    needs_template: bool = False
    tools: bool = True
    reasoning: bool = True
    priority: int = 0
    priority_reason: str = ""
    devices: Set[str] = Set(None)


@frozen(kw_only=True)
class ResponseParserContext:
    """Input of a response parser's factory.

    Attributes:
        tokenizer: transformers' tokenizer of the model.
        chat_template: its text, empty if there is none.
        special_tokens: the texts of the added tokens of the vocabulary, in no order.
        model_type: as in config.json, empty if it has none.
    """

    contract: int
    tokenizer: Any
    chat_template: str
    special_tokens: tuple[str, ...]
    model_type: str
    options: Any = None


def _mappings(value: Iterable[Mapping[str, Any]] | None) -> tuple[Mapping[str, Any], ...]:
    return tuple(value or ())


@frozen(kw_only=True)
class ResponseRequest:
    """Facts about a request that a parser may need.

    Attributes:
        tools: the functions in OpenAI's form, ``{"type": "function", "function": {"name", "parameters", ...}}``.
        tool_choice: one of `TOOL_CHOICES`.
        function: name of the function that must be called, with ``named``.
        parallel: whether there may be several calls.
        prompt: the end of the prompt's text, with special tokens. The output begins inside reasoning if it ends with a
            marker that opens one.
    """

    tools: tuple[Mapping[str, Any], ...] = field(default=(), converter=_mappings)
    tool_choice: str = "auto"
    function: str | None = None
    parallel: bool = True
    prompt: str = ""

    @property
    def calls(self) -> bool:
        """Return True if the output may hold tool calls. Otherwise their markers are plain content."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def callable_functions(self) -> tuple[Mapping[str, Any], ...]:
        """Return the functions that may be called: all, or the named one."""
        functions = tuple(tool.get("function", tool) for tool in self.tools)
        if self.tool_choice != "named":
            return functions
        return tuple(function for function in functions if function.get("name") == self.function)


class ResponseStream(Protocol):
    """Reader of one output. Used by one thread at a time."""

    def append(self, text: str) -> Sequence[ResponseEvent]:
        """Return what is new. Text that may be the beginning of a marker is held back."""
        ...

    def finish(self) -> Sequence[ResponseEvent]:
        """Return what was held back. The text is over, perhaps in the middle of a call. Called once, last."""
        ...


class ResponseParser(Protocol):
    """Protocol of a built response parser. Several threads may call it."""

    def start(self, request: ResponseRequest) -> ResponseStream:
        """Return the reader of an output of a request, of which nothing has been read."""
        ...

    def constraint(self, request: ResponseRequest) -> StructuredOutputsParams | None:
        """Return what the output must look like, so that the calls are those that `request` asks for.

        Called if calls are required, or a function is named or strict. None if the parser has no such form. Then the
        request is refused.
        """
        ...

    def reasoning_end(self, request: ResponseRequest) -> str | None:
        """Return the text after which a grammar may begin. None if the output has no reasoning before its content."""
        ...
