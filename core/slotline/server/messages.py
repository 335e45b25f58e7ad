"""`/v1/messages`: Anthropic's form of the assistant's turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from attrs import frozen
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from slotline.core.api.outputs import CompletionOutput, RequestOutput
from slotline.llm.turns import Answers, Turn, asked_tools, read_answers
from slotline.registry.contracts import StructuredOutputsParams
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.lora_request import AdapterChoice
from slotline.server.conversation import as_messages
from slotline.server.errors import as_http_error, unsupported
from slotline.server.fields import as_constraint, prompt_options
from slotline.server.http import EventStream, begun, json_response, named_event
from slotline.server.messages_blocks import as_chat
from slotline.server.messages_fields import MessagesFields, choice_for_chat, tools_for_chat
from slotline.server.messages_output import Block, BlockWriter
from slotline.server.outputs import refuse_failed
from slotline.server.state import ServerState, new_id, within_time
from slotline.text.template import chat_options

_UNSERVED = ("container", "mcp_servers", "context_management")
_SAMPLING = ("temperature", "top_k", "top_p", "seed", "min_p", "repetition_penalty", "max_tokens")
_SWITCH = "enable_thinking"
"""The variable of templates that switches reasoning on and off."""
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
Ending = tuple[StopReason | None, str | None]
"""Why the turn ended, and the stop sequence that it ended with."""


class MessagesUsage(Struct):
    """Counts of tokens. Those of the prompt that were in the cache are counted apart."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class Message(Struct, kw_only=True):
    """The assistant's turn."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


@frozen(kw_only=True)
class Asked:
    """A request as it was understood.

    Attributes:
        answers: how the text of the output is read.
    """

    state: ServerState
    id: str
    name: str
    adapter: AdapterChoice
    prompt: dict[str, Any]
    params: SamplingParams
    answers: Answers

    def outputs(self, kind: Any) -> AsyncGenerator[RequestOutput]:
        """Return the outputs of the prompt."""
        return self.state.generate(self.prompt, self.params, self.adapter, kind)

    def message(self, content: list[Block], usage: MessagesUsage, ending: Ending = (None, None)) -> Message:
        """Return the turn so far, or with its end."""
        reason, sequence = ending
        return Message(
            id=self.id, model=self.name, content=content, stop_reason=reason, stop_sequence=sequence, usage=usage
        )


async def create_message(state: ServerState, request: Request) -> Response:
    """Answer a request.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if it is wrong.
    """
    fields = await state.read(request, MessagesFields)
    for name in _UNSERVED:
        if getattr(fields, name):
            raise unsupported(name)
    if _thinks(fields) and state.llm.front.response_parser is None:
        raise unsupported("thinking")
    values = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    if (constraint := _constraint(fields)) is not None:
        values["structured_outputs"] = constraint
    params = SamplingParams(stop=fields.stop_sequences, **values)
    state.admit(1)
    asked = await _understood(state, fields, params)
    if fields.stream:
        return EventStream(await state.answer(request, begun(_events(asked))))
    return json_response(await state.answer(request, _whole(asked)))


def _thinks(fields: MessagesFields) -> bool:
    return fields.thinking is not None and fields.thinking.type != "disabled"


def _constraint(fields: MessagesFields) -> StructuredOutputsParams | None:
    form = fields.output_config and fields.output_config.format
    if form and fields.structured_outputs is not None:
        raise RequestError("output_config.format and structured_outputs together", fix="give one of them")
    if form:
        return StructuredOutputsParams(json=form.schema)
    return None if fields.structured_outputs is None else as_constraint(fields.structured_outputs)


async def _understood(state: ServerState, fields: MessagesFields, params: SamplingParams) -> Asked:
    name, adapter = state.model(fields.model)
    messages = as_chat(fields.messages, fields.system)
    tools, chosen = tools_for_chat(fields.tools), fields.tool_choice
    called = asked_tools(
        state.llm.front,
        tools,
        choice_for_chat(chosen, tools),
        not (chosen is not None and chosen.disable_parallel_tool_use),
    )
    options = chat_options(
        fields.chat_template_kwargs,
        _variables(state, fields),
        continue_final_message=bool(messages) and messages[-1].get("role") == "assistant",  # the turn goes on from it
        tools=tools if called.calls else None,
    )
    prompt = await state.llm.chat_prompt(await as_messages(messages, state.media), options)
    answers, params = read_answers(state.llm.front, called, prompt, reasoning=_thinks(fields), params=params)
    return Asked(
        state=state,
        id=new_id("msg"),
        name=name,
        adapter=adapter,
        prompt=prompt | prompt_options(fields),
        params=params,
        answers=answers,
    )


def _variables(state: ServerState, fields: MessagesFields) -> dict[str, Any]:
    """Return variables for the template: its switch for reasoning, if it has one, and the effort."""
    variables: dict[str, Any] = {}
    switched = _SWITCH in (fields.chat_template_kwargs or {})
    if not switched and state.llm.tokenizer.template_reads(_SWITCH):
        variables[_SWITCH] = _thinks(fields)
    if fields.output_config and fields.output_config.effort:
        variables["reasoning_effort"] = fields.output_config.effort
    return variables


def _ending(one: CompletionOutput, turn: Turn) -> Ending:
    if one.finish_reason == "length":
        return "max_tokens", None
    if isinstance(one.stop_reason, str):
        return "stop_sequence", one.stop_reason
    return ("tool_use" if turn.calls else "end_turn"), None


def _usage(output: RequestOutput, count: int) -> MessagesUsage:
    cached = output.metrics.num_cached_tokens
    return MessagesUsage(output.num_prompt_tokens - cached, count, cached)


async def _whole(asked: Asked) -> Message:
    """Return the answer once everything is there."""
    async with aclosing(asked.outputs("final_only")) as outputs:
        (output,) = [output async for output in outputs]
    (one,) = output.outputs
    refuse_failed(one)
    writer = BlockWriter(turn=asked.answers.turn())
    for _ in writer.read(one):
        pass
    return asked.message(writer.blocks, _usage(output, len(one.token_ids)), _ending(one, writer.turn))


async def _events(asked: Asked) -> AsyncGenerator[bytes]:
    """Yield the events of the answer: the message, blocks that grow, its end."""
    count, began, writer = 0, False, BlockWriter(turn=asked.answers.turn())
    try:
        async with aclosing(within_time(asked.outputs("delta"), asked.state.config.request_timeout)) as outputs:
            async for output in outputs:
                (one,) = output.outputs
                refuse_failed(one)
                if not began:
                    began = True
                    yield _event("message_start", message=asked.message([], _usage(output, 0)))
                count += len(one.token_ids)
                for name, values in writer.read(one):
                    yield _event(name, **values)
                if one.finish_reason is not None:
                    reason, sequence = _ending(one, writer.turn)
                    end = {"stop_reason": reason, "stop_sequence": sequence}
                    yield _event("message_delta", delta=end, usage=_usage(output, count))
                    yield _event("message_stop")
    except Exception as error:
        if not began:
            raise
        yield named_event("error", as_http_error(error).anthropic())


def _event(name: str, **values: Any) -> bytes:
    return named_event(name, {"type": name, **values})
