"""Conversion of a user's prompt to the arguments of `Engine.add`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slotline.core.api.prompts import Prompt, as_token_ids
from slotline.llm.encoder_prompts import DECODER, ENCODER, as_fields, one_prompt
from slotline.llm.prompt_embeds import as_prompt_embeds
from slotline.registry.errors import RequestError
from slotline.registry.plain_values import plain_number
from slotline.registry.safe_repr import safe_repr
from slotline.text.items import refuse_items
from slotline.text.tokenizer import Tokenizer

PROMPT_KEYS = {
    *("prompt", "prompt_token_ids", "prompt_embeds", ENCODER, DECODER, "multi_modal_data", "token_type_ids"),
    *("priority", "cache_salt", "request_id", "scheduling", "kv_transfer_params"),
}


_NOT_THE_POLICYS = PROMPT_KEYS | {"params", "index", "stream", "arrival", "features", "lora_request"}


class Fields(dict[str, Any]):
    """Arguments of `Engine.add` that were read before."""


def prompt_fields(
    prompt: Prompt, tokenizer: Callable[[], Tokenizer], reader: Any, *, text_only: bool = False
) -> dict[str, Any]:
    """Return the arguments of `Engine.add` for a prompt.

    Args:
        prompt: text, token ids or a mapping, as for `LLM.generate`.
        tokenizer: returns what makes token ids of a text. Called if the prompt has none.
        reader: reads items, see `PromptReader` of the extension `multimodal`. None for a text-only model.
        text_only: `multimodal.text_only` is why the model takes text alone.

    Raises:
        RequestError: if the prompt cannot be read.
    """
    if isinstance(prompt, Fields):
        return dict(prompt)
    fields = one_prompt({key: plain_number(value) for key, value in as_fields(prompt).items()}, reader)
    if fields.get("prompt_embeds", fields) is None:
        del fields["prompt_embeds"]
    if fields.keys() & {"multi_modal_data"} and reader is not None and reader.raw is not None:
        fields.setdefault("prompt_token_ids", [reader.raw])  # the item is all that the model reads
    unknown = set(fields) - PROMPT_KEYS
    if unknown or not {"prompt", "prompt_token_ids", "prompt_embeds", ENCODER} & set(fields):
        raise RequestError(
            f"a prompt with the keys {safe_repr(list(fields), 200)} cannot be read",
            fix="give 'prompt', 'prompt_token_ids' or 'prompt_embeds', and optionally 'multi_modal_data', 'priority', "
            "'cache_salt', 'request_id', 'scheduling', 'kv_transfer_params', 'token_type_ids'",
        )
    fields |= _scheduling(fields.pop("scheduling", None))
    if "prompt_embeds" in fields:
        return _with_embeds(fields)
    if ENCODER in fields:
        return _with_encoder(fields, tokenizer, reader)
    if "prompt_token_ids" not in fields:
        fields["prompt_token_ids"] = _encoded(fields["prompt"], tokenizer)
    data = fields.pop("multi_modal_data", None)
    return fields | _with_items(fields["prompt_token_ids"], data, reader, text_only=text_only) if data else fields


def _scheduling(given: Any) -> dict[str, Any]:
    """Return what a prompt says for the scheduler policy, as arguments of `Engine.add`.

    Raises:
        RequestError: if it is no mapping, or names an argument that is not the policy's.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"scheduling={safe_repr(given)} is no mapping", fix="give {'tenant': ...}")
    if wrong := sorted({*given} & _NOT_THE_POLICYS):
        raise RequestError(f"scheduling names {', '.join(wrong)}", fix="give only what the scheduler policy reads")
    return dict(given)


def _with_encoder(fields: dict[str, Any], tokenizer: Callable[[], Tokenizer], reader: Any) -> dict[str, Any]:
    """Return the fields of a prompt with a part for the encoder and one for the decoder.

    The decoder's part has no special tokens but those written in it, and begins with the token of its start.
    """
    given, decoder = as_fields(fields.pop(ENCODER)), fields.pop(DECODER)
    token_ids = list[int]()
    if decoder is not None:
        token_ids = _part(as_fields(decoder), DECODER, lambda text: tokenizer().encode_word(text))
    if token_ids[:1] != [reader.decoder_start]:
        token_ids.insert(0, reader.decoder_start)
    data = {**(fields.pop("multi_modal_data", None) or {})}
    data[reader.prompt] = _part(given, ENCODER, lambda text: tokenizer().encode(text))
    said = {"prompt": given["prompt"]} if isinstance(given.get("prompt"), str) else {}
    return {**fields, **said, **_with_items(token_ids, data, reader)}


def _part(fields: Mapping[str, Any], name: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the token ids of the encoder's or the decoder's part.

    Raises:
        RequestError: if it has neither a text nor token ids.
    """
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if token_ids is not None and fields.keys() <= {"prompt", "prompt_token_ids"}:
        return as_token_ids(token_ids)
    if not isinstance(text, str) or fields.keys() - {"prompt"}:
        raise RequestError(
            f"{name}={safe_repr(dict(fields), 80)} cannot be read", fix="give a text, token ids, or a mapping with one"
        )
    if not text and name == ENCODER:
        raise RequestError("the encoder_prompt is empty", fix="give at least one character")
    return encode(text)


def _with_embeds(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a prompt of embeddings, with token ids that hold their places."""
    if others := sorted({"prompt", "prompt_token_ids", "multi_modal_data"} & set(fields)):
        raise RequestError(f"a prompt has prompt_embeds beside {', '.join(others)}", fix="give one of them")
    embeds = as_prompt_embeds(fields["prompt_embeds"]).clone()  # the caller may write to its own
    return {**fields, "prompt_token_ids": [0] * len(embeds), "prompt_embeds": embeds}


def _with_items(
    token_ids: Sequence[int], data: Mapping[str, Any], reader: Any, *, text_only: bool = False
) -> dict[str, Any]:
    """Return the prompt's fields with its items in place of their placeholders."""
    if not isinstance(data, Mapping):
        raise RequestError(f"multi_modal_data={safe_repr(data)} is no mapping", fix="give {'image': ...}")
    if reader is None:
        refuse_items(data, left_out=text_only)
        return {}
    expanded, features = reader.read(as_token_ids(token_ids), data)
    return {"prompt_token_ids": expanded, "features": features}


def _encoded(text: str, tokenizer: Callable[[], Tokenizer]) -> list[int]:
    if not isinstance(text, str):
        raise RequestError(f"prompt={safe_repr(text)} is no text", fix="give a string, or 'prompt_token_ids'")
    if not text:
        raise RequestError("the prompt is empty", fix="give at least one character")
    return tokenizer().encode(text)
