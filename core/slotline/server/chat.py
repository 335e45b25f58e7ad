"""`/v1/chat/completions`: the assistant's turn of a conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from attrs import frozen
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from slotline.core.api.outputs import CompletionOutput, RequestOutput
from slotline.llm.turns import Answers, ToolCall, Turn, asked_tools, read_answers
from slotline.registry.contracts import ContentDelta, ReasoningDelta, ResponseEvent, ResponseRequest
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.lora_request import AdapterChoice
from slotline.server.conversation import as_messages
from slotline.server.errors import as_http_error, unsupported
from slotline.server.fields import SamplingFields, as_long_as_possible, prompt_options, sampling_params
from slotline.server.http import DONE, EventStream, begun, event, json_response
from slotline.server.outputs import ChatLogprobs, Counter, Usage, chat_logprobs, refuse_failed
from slotline.server.ranges import Messages, Natural, Positive
from slotline.server.state import ServerState, new_id, within_time
from slotline.server.tools import ToolCallDelta, call_delta
from slotline.text.template import ChatOptions, chat_options


class ChatFields(SamplingFields, kw_only=True):
    """The body of a request."""

    messages: Messages
    model: str | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Natural | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    prediction: Any = None
    reasoning_effort: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None
    web_search_options: Any = None


_UNSERVED = (
    "functions",
    "function_call",
    "audio",
    "prediction",
    "store",
    "verbosity",
    "web_search_options",
)
"""Fields of OpenAI's that are refused if they ask for anything."""


class Message(Struct):
    """The assistant's turn."""

    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class Choice(Struct):
    """An output."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Delta(Struct):
    """What is new of the assistant's turn."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class DeltaChoice(Struct):
    """What is new of an output."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatCompletion(Struct, kw_only=True):
    """An answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """A part of an answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: Usage | UnsetType | None = UNSET


@frozen(kw_only=True)
class Asked:
    """A request as it was understood.

    Attributes:
        name: of the model, in the answer.
        answers: how the texts of the outputs are read.
        top: how many of the most likely tokens are shown in each place. None for no log-probabilities.
        transfer: what another engine needs to continue.
    """

    state: ServerState
    id: str
    name: str
    created: int
    adapter: AdapterChoice
    prompt: dict[str, Any]
    params: SamplingParams
    answers: Answers
    top: int | None
    transfer: dict[str, Any] | UnsetType

    def outputs(self, kind: Any) -> AsyncGenerator[RequestOutput]:
        """Return the outputs of the prompt."""
        return self.state.generate(self.prompt, self.params, self.adapter, kind)

    def logprobs(self, one: CompletionOutput) -> ChatLogprobs | None:
        """Return the log-probabilities of an output, None unless asked for."""
        return None if self.top is None else chat_logprobs(one.logprobs or (), self.top)


async def create_chat_completion(state: ServerState, request: Request) -> Response:
    """Answer a request.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if it is wrong.
    """
    fields = await state.read(request, ChatFields)
    params = _params(state, fields)
    state.admit(1, params)
    asked = await _understood(state, fields, params)
    if fields.stream:
        return EventStream(await state.answer(request, begun(_events(asked, fields))))
    return json_response(await state.answer(request, _whole(asked)))


def _params(state: ServerState, fields: ChatFields) -> SamplingParams:
    """Return the sampling parameters. Without a limit the answer may take what the model's length leaves."""
    for name in _UNSERVED:
        if getattr(fields, name):
            raise unsupported(name)
    if fields.modalities not in (None, ["text"]):
        raise unsupported("modalities other than text")
    if fields.service_tier not in (None, "auto", "default"):
        raise unsupported("service_tier")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("top_logprobs without logprobs", fix="set logprobs to true")
    most = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    params = sampling_params(
        fields, max_tokens=most, logprobs=max(1, fields.top_logprobs or 0) if fields.logprobs else None
    )
    if most is None and "max_tokens" not in state.llm.front.sampling_defaults:
        return as_long_as_possible(params)
    return params


async def _understood(state: ServerState, fields: ChatFields, params: SamplingParams) -> Asked:
    name, adapter = state.model(fields.model)
    tools = asked_tools(state.llm.front, fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    options = _options(fields, tools)
    prompt = await state.llm.chat_prompt(await as_messages(fields.messages, state.media), options)
    answers, params = read_answers(
        state.llm.front, tools, prompt, reasoning=fields.include_reasoning is not False, params=params
    )
    if fields.request_id:
        prompt["request_id"] = fields.request_id
    return Asked(
        state=state,
        id=fields.request_id or new_id("chatcmpl"),
        name=name,
        created=int(time.time()),
        adapter=adapter,
        prompt=prompt | prompt_options(fields),
        params=params,
        answers=answers,
        top=(fields.top_logprobs or 0) if fields.logprobs else None,
        transfer=state.transfer_answer(fields.kv_transfer_params),
    )


def _options(fields: ChatFields, tools: ResponseRequest) -> ChatOptions:
    effort = {} if fields.reasoning_effort is None else {"reasoning_effort": fields.reasoning_effort}
    return chat_options(
        fields.chat_template_kwargs,
        effort,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        tools=fields.tools if tools.calls else None,
        documents=fields.documents,
    )


async def _whole(asked: Asked) -> ChatCompletion:
    """Return the answer once everything is there."""
    async with aclosing(asked.outputs("final_only")) as outputs:
        (output,) = [output async for output in outputs]
    choices = []
    for one in output.outputs:
        refuse_failed(one)
        turn = asked.answers.turn()
        turn.read(one)
        reason = turn.finish_reason(one.finish_reason)
        choices.append(Choice(one.index, _message(turn), asked.logprobs(one), reason, one.stop_reason))
    counter = Counter()
    counter.add(0, output)
    return ChatCompletion(
        id=asked.id,
        created=asked.created,
        model=asked.name,
        choices=choices,
        usage=counter.usage(),
        kv_transfer_params=asked.transfer,
    )


def _message(turn: Turn) -> Message:
    """Return the assistant's turn. One that only calls has no content."""
    message = Message("assistant", turn.content if turn.content or not turn.calls else None)
    if turn.calls:
        message.tool_calls = turn.calls
    if turn.reasoning and turn.answers.reasoning:
        message.reasoning_content = message.reasoning = turn.reasoning
    return message


def _deltas(turn: Turn, one: CompletionOutput, logprobs: ChatLogprobs | None) -> Iterator[DeltaChoice]:
    """Yield what is new of an output. Its log-probabilities go with the first part."""
    deltas = [_delta(turn, event) for event in turn.read(one)] or ([Delta(content="")] if logprobs else [])
    for delta in deltas:
        yield DeltaChoice(one.index, delta, logprobs)
        logprobs = None


def _delta(turn: Turn, event: ResponseEvent) -> Delta:
    if isinstance(event, ContentDelta):
        return Delta(content=event.text)
    if isinstance(event, ReasoningDelta):
        return Delta(reasoning_content=event.text, reasoning=event.text)
    return Delta(tool_calls=[call_delta(turn, event)])


async def _events(asked: Asked, fields: ChatFields) -> AsyncGenerator[bytes]:
    """Yield the chunks of the answer as events. The first one of each output names its role."""
    options = fields.stream_options
    continuous = bool(options and options.continuous_usage_stats)
    unknown = None if options and options.include_usage else UNSET
    counter, turns = Counter(), dict[int, Turn]()

    def chunk(choices: list[DeltaChoice], usage: Usage | UnsetType | None) -> bytes:
        return event(ChatChunk(id=asked.id, created=asked.created, model=asked.name, choices=choices, usage=usage))

    try:
        async with aclosing(within_time(asked.outputs("delta"), asked.state.config.request_timeout)) as outputs:
            async for output in outputs:
                counter.add(0, output)
                usage = counter.usage() if continuous else unknown
                for one in output.outputs:
                    refuse_failed(one)
                    if one.index not in turns:
                        turns[one.index] = asked.answers.turn()
                        yield chunk([DeltaChoice(one.index, Delta("assistant", ""))], unknown)
                    turn = turns[one.index]
                    for delta in _deltas(turn, one, asked.logprobs(one) if one.logprobs else None):
                        yield chunk([delta], usage)
                    if one.finish_reason is not None:
                        reason = turn.finish_reason(one.finish_reason)
                        end = DeltaChoice(one.index, Delta(), None, reason, one.stop_reason)
                        yield chunk([end], usage)
    except Exception as error:
        if not turns:
            raise
        yield event(as_http_error(error).openai())
        return
    if options and options.include_usage:
        yield chunk([], counter.usage())
    yield DONE
