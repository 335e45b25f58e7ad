"""`/v1/responses`: OpenAI's Responses. Nothing is stored, so each request holds its whole conversation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from attrs import frozen
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from slotline.core.api.outputs import CompletionOutput, RequestOutput
from slotline.llm.turns import Answers, asked_tools, read_answers
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.lora_request import AdapterChoice
from slotline.server.conversation import as_messages
from slotline.server.errors import HttpError, as_http_error
from slotline.server.fields import prompt_options
from slotline.server.http import DONE, EventStream, begun, json_response, named_event
from slotline.server.outputs import refuse_failed
from slotline.server.responses_fields import (
    Choice,
    FunctionTool,
    PlainText,
    ReasoningConfig,
    ResponsesFields,
    TextConfig,
    checked_params,
    for_chat,
    read_tools,
)
from slotline.server.responses_items import as_conversation
from slotline.server.responses_output import Event, ItemWriter, OutputItem
from slotline.server.state import ServerState, new_id, within_time
from slotline.text.template import chat_options

Progress = Literal["in_progress", "completed", "incomplete", "failed"]
_STATUS: dict[str, Progress] = {"stop": "completed", "length": "incomplete"}


class InputDetails(Struct):
    """Details of a prompt's tokens. None are counted as written to a cache, since all that fit are."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """Details of an answer's tokens. Those of reasoning are counted by its text."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseResource(Struct, kw_only=True):
    """An answer: what was asked for as it was understood, and the items so far."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Progress = "in_progress"
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    tools: list[FunctionTool]
    tool_choice: Choice
    parallel_tool_calls: bool
    text: TextConfig
    reasoning: ReasoningConfig
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    max_tool_calls: None = None
    truncation: str = "disabled"
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    previous_response_id: None = None
    store: bool = False
    background: bool = False
    service_tier: str = "default"


@frozen(kw_only=True)
class Asked:
    """A request as it was understood.

    Attributes:
        resource: the answer, of which nothing is there.
        answers: how the text of the output is read.
        top: how many of the most likely tokens are shown in each place. None for no log-probabilities.
    """

    state: ServerState
    adapter: AdapterChoice
    prompt: dict[str, Any]
    params: SamplingParams
    resource: ResponseResource
    answers: Answers
    top: int | None

    def outputs(self, kind: Any) -> AsyncGenerator[RequestOutput]:
        """Return the outputs of the prompt."""
        return self.state.generate(self.prompt, self.params, self.adapter, kind)

    def writer(self) -> ItemWriter:
        """Return the writer of the answer's items."""
        writer = ItemWriter(turn=self.answers.turn(), top=self.top)
        self.resource.output = writer.items
        return writer

    async def complete(self, output: RequestOutput, one: CompletionOutput, writer: ItemWriter, count: int) -> None:
        """Put the end of the answer and its counts into the resource.

        Args:
            output, one: the last ones.
            count: tokens of the output.
        """
        resource = self.resource
        resource.status = _STATUS.get(one.finish_reason or "", "failed")
        if resource.status == "completed":
            resource.completed_at = int(time.time())
        elif resource.status == "incomplete":
            resource.incomplete_details = {"reason": "max_output_tokens"}
        else:
            resource.error = {"code": "server_error", "message": "the request was aborted"}
        prompt, thought = output.num_prompt_tokens, 0
        if writer.turn.reasoning:
            words = await asyncio.to_thread(self.state.llm.tokenizer.encode_word, writer.turn.reasoning)
            thought = min(len(words), count)
        cached = InputDetails(output.metrics.num_cached_tokens)
        resource.usage = ResponseUsage(prompt, cached, count, OutputDetails(thought), prompt + count)


async def create_response(state: ServerState, request: Request) -> Response:
    """Answer a request.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if it is wrong.
    """
    fields = await state.read(request, ResponsesFields)
    params = checked_params(fields, state.llm.front.sampling_defaults)
    state.admit(1)
    asked = await _understood(state, fields, params)
    if fields.stream:
        return EventStream(await state.answer(request, begun(_events(asked))))
    return json_response(await state.answer(request, _whole(asked)))


async def _understood(state: ServerState, fields: ResponsesFields, params: SamplingParams) -> Asked:
    name, adapter = state.model(fields.model)
    given = read_tools(fields)
    tools, choice = for_chat(given, fields.tool_choice)
    called = asked_tools(state.llm.front, tools, choice, fields.parallel_tool_calls)
    effort = {"reasoning_effort": fields.reasoning.effort} if fields.reasoning and fields.reasoning.effort else {}
    options = chat_options(fields.chat_template_kwargs, effort, tools=tools if called.calls else None)
    messages = await as_messages(as_conversation(fields.input, fields.instructions), state.media)
    prompt = await state.llm.chat_prompt(messages, options)
    resource = _resource(fields, given, params.with_defaults(state.llm.front.sampling_defaults), name)
    answers, params = read_answers(
        state.llm.front, called, prompt, reasoning=fields.include_reasoning is not False, params=params
    )
    if fields.request_id:
        prompt["request_id"] = fields.request_id
    return Asked(
        state=state,
        adapter=adapter,
        prompt=prompt | prompt_options(fields),
        params=params,
        resource=resource,
        answers=answers,
        top=None if params.logprobs is None else fields.top_logprobs or 0,
    )


def _resource(
    fields: ResponsesFields, tools: list[FunctionTool], params: SamplingParams, name: str
) -> ResponseResource:
    return ResponseResource(
        id=fields.request_id or new_id("resp").replace("-", "_"),
        created_at=int(time.time()),
        model=name,
        instructions=fields.instructions,
        tools=tools,
        tool_choice=fields.tool_choice or "auto",
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        text=TextConfig(format=(fields.text and fields.text.format) or PlainText()),
        reasoning=fields.reasoning or ReasoningConfig(),
        temperature=params.temperature,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        top_logprobs=fields.top_logprobs or 0,
        max_output_tokens=fields.max_output_tokens,
        metadata=fields.metadata or {},
        user=fields.user,
        safety_identifier=fields.safety_identifier,
        prompt_cache_key=fields.prompt_cache_key,
    )


async def _whole(asked: Asked) -> ResponseResource:
    """Return the answer once everything is there. Log-probabilities are read token by token, to find their texts."""
    writer, count = asked.writer(), 0
    async with aclosing(asked.outputs("final_only" if asked.top is None else "delta")) as outputs:
        async for output in outputs:
            (one,) = output.outputs
            refuse_failed(one)
            count += len(one.token_ids)
            for _ in writer.read(one):
                pass
    await asked.complete(output, one, writer, count)
    return asked.resource


async def _events(asked: Asked) -> AsyncGenerator[bytes]:
    """Yield the answer's events in their order, each with its number."""
    number, count, writer = 0, 0, asked.writer()

    def sent(event: Event) -> bytes:
        nonlocal number
        name, values = event
        number += 1
        return named_event(name, {"type": name, "sequence_number": number - 1, **values})

    def state() -> dict[str, Any]:
        return {"response": asked.resource}

    try:
        async with aclosing(within_time(asked.outputs("delta"), asked.state.config.request_timeout)) as outputs:
            async for output in outputs:
                (one,) = output.outputs
                refuse_failed(one)
                if not number:
                    yield sent(("response.created", state()))
                    yield sent(("response.in_progress", state()))
                count += len(one.token_ids)
                for event in writer.read(one):
                    yield sent(event)
        await asked.complete(output, one, writer, count)
        yield sent((f"response.{asked.resource.status}", state()))
    except Exception as error:
        if not number:
            raise
        for event in writer.end("incomplete"):
            yield sent(event)
        asked.resource.status, asked.resource.error = "failed", _error(as_http_error(error))
        yield sent(("response.failed", state()))
    yield DONE


def _error(error: HttpError) -> dict[str, str]:
    """Return an error in the form of an answer. What clients know by code are rate limits and the server's faults."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    return {"code": code, "message": error.message}
