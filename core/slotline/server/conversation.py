"""Messages of OpenAI's form, as chat templates read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from slotline.media.reader import NAMED, MediaReader
from slotline.registry.config.schema import MultimodalConfig
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr
from slotline.server.audio_fields import recording
from slotline.text.items import with_plain_parts

_TEXTS = ("text", "input_text", "output_text")


async def as_messages(messages: Sequence[dict[str, Any]], config: MultimodalConfig) -> list[dict[str, Any]]:
    """Return messages with images and videos read and the arguments of tool calls as objects.

    Args:
        messages: of a request.
        config: what of other servers and of this one's files they may name, and how much.

    Raises:
        RequestError: if a part or an argument cannot be read.
    """
    read = [_message(message) for message in messages]
    items = [
        part
        for message in read
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and part.get("type") in NAMED
    ]
    if items:
        await asyncio.to_thread(_open, items, MediaReader(config, remote=True))
    return read


def _open(parts: Sequence[dict[str, Any]], reader: MediaReader) -> None:
    """Put the opened item of each part in the place of its name."""
    for part in parts:
        part[part["type"]] = reader.read(part["type"], part[part["type"]])


def _message(message: dict[str, Any]) -> dict[str, Any]:
    read = dict(with_plain_parts(message))
    if read.get("role") == "developer":
        read["role"] = "system"
    if isinstance(content := read.get("content"), list):
        read["content"] = [_part(part) for part in content]
    if isinstance(calls := read.get("tool_calls"), list):
        read["tool_calls"] = [_call(call) for call in calls]
    return read


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS:
        return {**part, "type": "text"}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if kind == "input_audio":
        return {"type": "audio", "audio": recording(part.get("input_audio"))}
    return dict(part) if kind in NAMED else part


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, as templates print them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the arguments of the tool call {safe_repr(function.get('name'))} are no JSON: {error}",
            fix="send back the arguments that the model wrote",
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}
