"""Messages of OpenAI's form, as chat templates read them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

_TEXTS = ("text", "input_text", "output_text")


async def as_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with images read and the arguments of tool calls as objects.

    Raises:
        RequestError: if a part or an argument cannot be read.
    """
    return await asyncio.to_thread(_read, messages) if _has_images(messages) else _read(messages)


def _has_images(messages: Sequence[dict[str, Any]]) -> bool:
    return any(
        isinstance(part, dict) and part.get("type") == "image_url"
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def _read(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_message(message) for message in messages]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    read = dict(message)
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
    return {"type": "image", "image": _image(part.get("image_url"))} if kind == "image_url" else part


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


def _image(given: Any) -> Any:
    """Return the image of a data URL. Nothing is fetched from other servers."""
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url.startswith("data:image/"):
        raise RequestError(
            f"image_url={safe_repr(url)} is no data URL, and this server fetches nothing",
            fix="send the image itself, as 'data:image/png;base64,...'",
        )
    try:
        from PIL import Image

        data = base64.b64decode(url.partition(",")[2], validate=True)
        image = Image.open(BytesIO(data))
        image.load()
    except ImportError as error:
        raise RequestError("images need pillow", fix="install slotline[multimodal]") from error
    except (binascii.Error, OSError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(f"an image cannot be read: {error}", fix="send a PNG or JPEG file in base64") from error
    return image
