"""Conversion of a user's prompt to the arguments of `Engine.add`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slotline.core.api.prompts import PROMPT_KEYS, Prompt, as_token_ids
from slotline.llm.prompt_embeds import as_prompt_embeds
from slotline.registry.errors import RequestError
from slotline.registry.plain_values import plain_number
from slotline.registry.safe_repr import safe_repr
from slotline.text.items import refuse_items


def prompt_fields(prompt: Prompt, encode: Callable[[str], list[int]], reader: Any) -> dict[str, Any]:
    """Return the arguments of `Engine.add` for a prompt.

    Args:
        prompt: text, token ids or a mapping, as for `LLM.generate`.
        encode: converts a text to token ids. Called if the prompt has none.
        reader: reads items, see `PromptReader` of the extension `multimodal`. None for a text-only model.

    Raises:
        RequestError: if the prompt cannot be read.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt, "prompt_token_ids": _encoded(prompt, encode)}
    if not isinstance(prompt, Mapping):
        return {"prompt_token_ids": prompt}
    fields = {key: plain_number(value) for key, value in prompt.items()}
    if fields.get("prompt_embeds", fields) is None:
        del fields["prompt_embeds"]
    if fields.keys() & {"multi_modal_data"} and reader is not None and reader.raw is not None:
        fields.setdefault("prompt_token_ids", [reader.raw])  # the item is all that the model reads
    unknown = set(fields) - PROMPT_KEYS
    if unknown or not {"prompt", "prompt_token_ids", "prompt_embeds"} & set(fields):
        raise RequestError(
            f"a prompt with the keys {safe_repr(list(fields), 200)} cannot be read",
            fix="give 'prompt', 'prompt_token_ids' or 'prompt_embeds', and optionally 'multi_modal_data', 'priority', "
            "'cache_salt', 'request_id', 'token_type_ids'",
        )
    if "prompt_embeds" in fields:
        return _with_embeds(fields)
    if "prompt_token_ids" not in fields:
        fields["prompt_token_ids"] = _encoded(fields["prompt"], encode)
    data = fields.pop("multi_modal_data", None)
    return fields | _with_items(fields["prompt_token_ids"], data, reader) if data else fields


def _with_embeds(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a prompt of embeddings, with token ids that hold their places."""
    if others := sorted({"prompt", "prompt_token_ids", "multi_modal_data"} & set(fields)):
        raise RequestError(f"a prompt has prompt_embeds beside {', '.join(others)}", fix="give one of them")
    embeds = as_prompt_embeds(fields["prompt_embeds"]).clone()  # the caller may write to its own
    return {**fields, "prompt_token_ids": [0] * len(embeds), "prompt_embeds": embeds}


def _with_items(token_ids: Sequence[int], data: Mapping[str, Any], reader: Any) -> dict[str, Any]:
    """Return the prompt's fields with its items in place of their placeholders."""
    if not isinstance(data, Mapping):
        raise RequestError(f"multi_modal_data={safe_repr(data)} is no mapping", fix="give {'image': ...}")
    if reader is None:
        refuse_items(data)
        return {}
    expanded, features = reader.read(as_token_ids(token_ids), data)
    return {"prompt_token_ids": expanded, "features": features}


def _encoded(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    if not isinstance(text, str):
        raise RequestError(f"prompt={safe_repr(text)} is no text", fix="give a string, or 'prompt_token_ids'")
    if not text:
        raise RequestError("the prompt is empty", fix="give at least one character")
    return encode(text)
