"""`/v1/messages`: Anthropic's form of the assistant's turn. Thoughts and tool calls are not served."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from attrs import frozen
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from slotline.core.api.outputs import CompletionOutput, RequestOutput
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.lora_request import AdapterChoice
from slotline.server.conversation import as_messages
from slotline.server.errors import as_http_error, unsupported
from slotline.server.fields import Fields
from slotline.server.http import EventStream, begun, json_response, named_event
from slotline.server.outputs import refuse_failed
from slotline.server.state import ServerState, new_id, within_time
from slotline.text.template import chat_options


class MessagesFields(Fields, kw_only=True):
    """The body of a request. The remaining fields are slotline's own."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None


_UNSERVED = ("tools", "tool_choice", "container", "mcp_servers", "context_management")
_SAMPLING = ("temperature", "top_k", "top_p", "seed", "min_p", "repetition_penalty", "max_tokens")
StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class TextBlock(Struct, kw_only=True):
    """A text of the turn."""

    type: str = "text"
    text: str


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
    content: list[TextBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


@frozen(kw_only=True)
class Asked:
    """A request as it was understood."""

    state: ServerState
    id: str
    name: str
    adapter: AdapterChoice
    prompt: dict[str, Any]
    params: SamplingParams

    def outputs(self, kind: Any) -> AsyncGenerator[RequestOutput]:
        """Return the outputs of the prompt."""
        return self.state.generate(self.prompt, self.params, self.adapter, kind)

    def message(self, content: list[TextBlock], usage: MessagesUsage, one: CompletionOutput | None = None) -> Message:
        """Return the turn so far, or with its end if there is an output."""
        reason, sequence = (None, None) if one is None else _ending(one)
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
    if fields.thinking is not None and fields.thinking.get("type") != "disabled":
        raise unsupported("thinking")
    values = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    params = SamplingParams(stop=fields.stop_sequences, **values)
    state.admit(1)
    asked = await _understood(state, fields, params)
    if fields.stream:
        return EventStream(await state.answer(request, begun(_events(asked))))
    return json_response(await state.answer(request, _whole(asked)))


async def _understood(state: ServerState, fields: MessagesFields, params: SamplingParams) -> Asked:
    name, adapter = state.model(fields.model)
    messages = [_plain(message) for message in fields.messages]
    if fields.system:
        messages.insert(0, {"role": "system", "content": _text(fields.system)})
    prefilled = bool(messages) and messages[-1].get("role") == "assistant"  # the turn goes on from it
    options = chat_options(fields.chat_template_kwargs, {}, continue_final_message=prefilled)
    prompt = await state.llm.chat_prompt(await as_messages(messages), options)
    more = {"priority": fields.priority or 0, "cache_salt": fields.cache_salt or ""}
    return Asked(state=state, id=new_id("msg"), name=name, adapter=adapter, prompt=prompt | more, params=params)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its blocks as parts of OpenAI's form."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(block) for block in content]}


def _part(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "image" and isinstance(source := block.get("source"), dict):
        if source.get("type") != "base64":
            raise RequestError("an image's source is no base64", fix="send the image itself; nothing is fetched")
        url = f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "text":
        return {"type": "text", "text": block.get("text")}  # without marks for a cache that is always on
    return block


def _text(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    texts = [block.get("text") for block in system if block.get("type") == "text"]
    if len(texts) != len(system) or not all(isinstance(text, str) for text in texts):
        raise RequestError("system has a block that is no text", fix="give a text, or blocks of type text")
    return "\n".join(map(str, texts))


def _ending(one: CompletionOutput) -> tuple[StopReason, str | None]:
    if one.finish_reason == "length":
        return "max_tokens", None
    if isinstance(one.stop_reason, str):
        return "stop_sequence", one.stop_reason
    return "end_turn", None


def _usage(output: RequestOutput, count: int) -> MessagesUsage:
    cached = output.metrics.num_cached_tokens
    return MessagesUsage(len(output.prompt_token_ids) - cached, count, cached)


async def _whole(asked: Asked) -> Message:
    """Return the answer once everything is there."""
    async with aclosing(asked.outputs("final_only")) as outputs:
        (output,) = [output async for output in outputs]
    (one,) = output.outputs
    refuse_failed(one)
    return asked.message([TextBlock(text=one.text)], _usage(output, len(one.token_ids)), one)


async def _events(asked: Asked) -> AsyncGenerator[bytes]:
    """Yield the events of the answer: the message, one block of text that grows, its end."""
    count, began = 0, False
    try:
        async with aclosing(within_time(asked.outputs("delta"), asked.state.config.request_timeout)) as outputs:
            async for output in outputs:
                (one,) = output.outputs
                refuse_failed(one)
                if not began:
                    began = True
                    for name, event in _beginning(asked, output):
                        yield named_event(name, event)
                count += len(one.token_ids)
                if one.text:
                    delta = {"type": "text_delta", "text": one.text}
                    yield named_event(*_typed("content_block_delta", index=0, delta=delta))
                if one.finish_reason is not None:
                    reason, sequence = _ending(one)
                    yield named_event(*_typed("content_block_stop", index=0))
                    end = {"stop_reason": reason, "stop_sequence": sequence}
                    yield named_event(*_typed("message_delta", delta=end, usage=_usage(output, count)))
                    yield named_event(*_typed("message_stop"))
    except Exception as error:
        if not began:
            raise
        yield named_event("error", as_http_error(error).anthropic())


def _beginning(asked: Asked, output: RequestOutput) -> list[tuple[str, dict[str, Any]]]:
    return [
        _typed("message_start", message=asked.message([], _usage(output, 0))),
        _typed("content_block_start", index=0, content_block=TextBlock(text="")),
    ]


def _typed(name: str, **values: Any) -> tuple[str, dict[str, Any]]:
    return name, {"type": name, **values}
