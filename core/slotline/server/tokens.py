"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from slotline.server.conversation import as_messages
from slotline.server.errors import HttpError
from slotline.server.fields import Fields
from slotline.server.http import json_response
from slotline.server.ranges import Messages, Token
from slotline.server.state import ServerState
from slotline.text.template import chat_options


class TokenizeFields(Fields):
    """The body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    """The body of `/detokenize`."""

    tokens: list[Token]
    model: str | None = None


class Tokenized(Struct):
    """The tokens of a text or of a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct):
    """The text of tokens."""

    prompt: str


async def tokenize(state: ServerState, request: Request) -> Response:
    """Answer with the tokens of a text or of a conversation.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if the request is wrong.
    """
    fields = await state.read(request, TokenizeFields)
    state.model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise HttpError(400, "give either prompt or messages", param="prompt", code="invalid_value")
    tokenizer = state.llm.tokenizer
    if fields.messages is not None:
        options = chat_options(
            fields.chat_template_kwargs,
            {},
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=bool(fields.continue_final_message),
            tools=fields.tools,
        )
        prompt = await state.llm.chat_prompt(await as_messages(fields.messages, state.media), options)
        token_ids = prompt["prompt_token_ids"]
    else:
        encode = tokenizer.encode_word if fields.add_special_tokens is False else tokenizer.encode
        token_ids = await asyncio.to_thread(encode, fields.prompt or "")
    answer = Tokenized(len(token_ids), state.llm.front.limits.max_model_len, list(token_ids))
    if fields.return_token_strs:
        answer.token_strs = tokenizer.transformers.convert_ids_to_tokens(list(token_ids))
    return json_response(answer)


async def detokenize(state: ServerState, request: Request) -> Response:
    """Answer with the text of tokens.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if the request is wrong.
    """
    fields = await state.read(request, DetokenizeFields)
    state.model(fields.model)
    size = state.llm.front.limits.vocab_size
    if wrong := [token for token in fields.tokens if not 0 <= token < size]:
        raise HttpError(
            400, f"token {wrong[0]} is none of the {size:,} of the vocabulary", param="tokens", code="invalid_value"
        )
    return json_response(Detokenized(await asyncio.to_thread(state.llm.tokenizer.decode, fields.tokens)))
