"""The assistant's turn: what a request asks for of tools, and what the answer's text says of reasoning and calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from attrs import define, evolve, field, frozen

from slotline.core.api.outputs import CompletionOutput
from slotline.ranks.replicas.front import Front
from slotline.registry.contracts import (
    ContentDelta,
    ReasoningDelta,
    ResponseEvent,
    ResponseParser,
    ResponseRequest,
    ResponseStream,
    ToolCallBegin,
)
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

_PROMPT_END = 256
"""Tokens of the prompt's end that a parser sees."""


class ToolsError(RequestError):
    """Tools, or a choice of them, that a request cannot have.

    Attributes:
        param: the field at fault.
        code: ``unsupported`` for what this model cannot do, ``invalid_value`` for what is wrong.
    """

    def __init__(self, message: str, *, fix: str, param: str, code: str = "invalid_value") -> None:
        super().__init__(message, fix=fix)
        self.param = param
        self.code = code


@define
class FunctionCall:
    """Name and arguments of a call, the arguments as the model wrote them."""

    name: str
    arguments: str = ""


@define
class ToolCall:
    """A call."""

    id: str
    function: FunctionCall
    type: str = "function"


@frozen(kw_only=True)
class Answers:
    """How the outputs of a request are read.

    Attributes:
        parser: None to take texts as content.
        request: what the parser is told.
        reasoning: whether the answer shows reasoning.
        ends: texts of the tokens that end an output, by token.
    """

    parser: ResponseParser | None
    request: ResponseRequest
    reasoning: bool
    ends: dict[int, str]

    def turn(self) -> Turn:
        """Return the reader of one output."""
        return Turn(answers=self, stream=None if self.parser is None else self.parser.start(self.request))


@define(eq=False, kw_only=True)
class Turn:
    """Reader of one output, and what was read of it so far.

    Attributes:
        calls: the calls whose name is known, with the arguments so far.
    """

    answers: Answers
    stream: ResponseStream | None
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(factory=list)

    def read(self, one: CompletionOutput) -> Sequence[ResponseEvent]:
        """Return what an output, or what is new of it, says. Calls beside the only one that is wanted are left out."""
        if self.stream is None:
            events: Sequence[ResponseEvent] = [ContentDelta(one.text)] if one.text else []
        else:
            events = self.stream.append(_without_end(one, self.answers.ends))
            if one.finish_reason is not None:
                events = [*events, *self.stream.finish()]
        return [event for event in events if self._shown(event)]

    def _shown(self, event: ResponseEvent) -> bool:
        """Keep what an event says. Return False if the answer does not show it."""
        if isinstance(event, ContentDelta):
            self.content += event.text
            return True
        if isinstance(event, ReasoningDelta):
            self.reasoning += event.text
            return self.answers.reasoning
        if event.index and not self.answers.request.parallel:
            return False
        if isinstance(event, ToolCallBegin):
            self.calls.append(ToolCall(event.id or f"call_{uuid4().hex[:24]}", FunctionCall(event.name)))
        else:
            self.calls[event.index].function.arguments += event.text
        return True

    def message(self) -> dict[str, Any]:
        """Return the turn as a message of a conversation, with the arguments of calls as objects where they are."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning and self.answers.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": _as_object(call.function)} for call in self.calls
            ]
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """Return why the output ended. One that ended by itself after a call ended for the call."""
        return "tool_calls" if self.calls and reason == "stop" else reason


def asked_tools(engine: Front, tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ResponseRequest:
    """Return what a request says of tools.

    Raises:
        ToolsError: for a tool or choice that is none, or if the model's form of calls is not known.
    """
    names = [_checked_name(index, tool) for index, tool in enumerate(tools or ())]
    kind, name = _choice(choice, names)
    request = ResponseRequest(tools=tuple(tools or ()), tool_choice=kind, function=name, parallel=parallel is not False)
    if request.calls and engine.response_parser is None:
        raise _no_parser(engine)
    return request


def read_answers(
    engine: Front, request: ResponseRequest, prompt: dict[str, Any], *, reasoning: bool, params: SamplingParams
) -> tuple[Answers, SamplingParams]:
    """Return how outputs are read, and the parameters with what holds the calls and keeps the markers.

    Raises:
        ToolsError, RequestError: if the calls cannot be held to the model's form.
    """
    parser = engine.response_parser
    if parser is None:
        return Answers(parser=None, request=request, reasoning=reasoning, ends={}), params
    assert engine.tokenizer is not None  # there is no parser without
    ids = (prompt.get("prompt_token_ids") or ())[-_PROMPT_END:]
    request = evolve(request, prompt=engine.tokenizer.decode(ids))
    ends = {token: engine.tokenizer.decode([token]) for token in (*engine.eos_token_ids, *params.stop_token_ids)}
    values: dict[str, Any] = {"skip_special_tokens": False}
    constraint = params.structured_outputs
    if request.calls and _held(request):
        if constraint is not None:
            raise RequestError(
                "structured output beside tools that must be called or are strict", fix="leave one of them out"
            )
        if (constraint := parser.constraint(request)) is None:
            raise ToolsError(
                "the model's form of tool calls cannot be enforced",
                fix="leave tool_choice and strict out",
                param="tool_choice",
                code="unsupported",
            )
    if constraint is not None and constraint.after is None and (end := parser.reasoning_end(request)) is not None:
        constraint = evolve(constraint, after=end)
    given = {name: getattr(params, name) for name in params.given}
    if constraint is not None:
        values["structured_outputs"] = constraint
    return Answers(parser=parser, request=request, reasoning=reasoning, ends=ends), SamplingParams(
        **{**given, **values}
    )


def _held(request: ResponseRequest) -> bool:
    strict = any(function.get("strict") for function in request.callable_functions)
    return strict or request.tool_choice in ("required", "named")


def _no_parser(engine: Front) -> ToolsError:
    why = next((s.origin for s in engine.plan.settings if s.key == "response_parser.name"), "there is none")
    return ToolsError(
        f"tools are not supported with this model: no response parser reads its calls ({why})",
        fix="set response_parser.name to one that does, or leave tools out",
        param="tools",
        code="unsupported",
    )


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call as an object, None if they are none, as where they broke off."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _as_object(call: FunctionCall) -> dict[str, Any]:
    """Return a call as templates read it. Arguments that are no object stay a text."""
    arguments = read_arguments(call.arguments)
    return {"name": call.name, "arguments": call.arguments if arguments is None else arguments}


def _without_end(one: CompletionOutput, ends: dict[int, str]) -> str:
    """Return the text of an output without the text of the token that ended it."""
    if one.finish_reason == "stop" and one.token_ids and (end := ends.get(one.token_ids[-1])):
        return one.text.removesuffix(end)
    return one.text


def _checked_name(index: int, tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    parameters = function.get("parameters") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name or not isinstance(parameters, dict | None):
        raise ToolsError(
            f"tools[{index}] is no function with a name and a schema of its parameters",
            fix="give {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}",
            param=f"tools[{index}]",
        )
    return name


def _choice(given: Any, names: Sequence[str]) -> tuple[str, str | None]:
    """Return the kind of a choice, and the function that it names."""
    if given is None or given in ("none", "auto", "required"):
        if given == "required" and not names:
            raise ToolsError("tool_choice without tools", fix="give tools, or leave it out", param="tool_choice")
        return given or ("auto" if names else "none"), None
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise ToolsError(
            f"tool_choice is {safe_repr(given)}",
            fix="give 'none', 'auto', 'required', or one of the tools as "
            "{'type': 'function', 'function': {'name': ...}}",
            param="tool_choice",
        )
    return "named", name
