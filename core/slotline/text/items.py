"""Items beside the text of a prompt, as users give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slotline.registry.errors import RequestError


def refuse_items(data: Mapping[str, Any]) -> None:
    """Refuse items for a text-only model.

    Raises:
        RequestError: if there are any items.
    """
    if any(as_items(given) for given in data.values()):
        raise RequestError(
            f"multi_modal_data has {', '.join(map(str, data))}, and this model takes text alone",
            fix="leave multi_modal_data out, or use a model that takes images",
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
