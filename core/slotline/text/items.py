"""Items beside the text of a prompt, as users give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slotline.registry.errors import RequestError


def refuse_items(data: Mapping[str, Any], *, left_out: bool = False) -> None:
    """Refuse items for a model of text alone.

    Args:
        left_out: the model has encoders, and `multimodal.text_only` leaves them out.

    Raises:
        RequestError: if there are any items.
    """
    if not any(as_items(given) for given in data.values()):
        return
    why, fix = "this model takes text alone", "use a model that takes images"
    if left_out:
        why, fix = "multimodal.text_only = true serves the model's text part alone", "set multimodal.text_only = false"
    raise RequestError(
        f"multi_modal_data has {', '.join(map(str, data))}, and {why}", fix=f"leave multi_modal_data out, or {fix}"
    )


_URLS = {"image_url": "image", "video_url": "video"}
"""Parts of OpenAI's form, which hold the URL under their own name, by their modality."""


def with_plain_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose parts have their items under the name of their modality.

    An image may be ``{"type": "image_url", "image_url": {"url": url}}`` or ``{"type": "image", "url": url}``, also with
    ``path`` or ``base64`` as in transformers.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": [_plain_part(part) for part in content]}


def _plain_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return part
    if (modality := _URLS.get(kind)) is not None:
        given = part.get(kind)
        return {"type": modality, modality: given.get("url") if isinstance(given, Mapping) else given}
    if kind not in _URLS.values() or kind in part:
        return part
    for name in ("url", "path"):
        if name in part:
            return {"type": kind, kind: part[name]}
    if "base64" in part:
        return {"type": kind, kind: f"data:{kind}/*;base64,{part['base64']}"}
    raise RequestError(
        f"a part of type {kind!r} has no {kind}", fix=f"give {{'type': '{kind}', '{kind}': ...}}, or 'url' in its place"
    )


def items_of(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the items in a conversation's messages, by modality. A part holds its item under the name of its type."""
    data: dict[str, list[Any]] = {}
    for message in messages:
        content = message.get("content")
        parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
        for part in parts:
            kind = str(part.get("type"))
            if kind != "text" and kind in part:
                data.setdefault(kind, []).append(part[kind])
    return data


def as_items(given: Any) -> list[Any]:
    """Return the items of a modality as they were given: one, a list of them, or None."""
    return list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
