"""Conversations: check of messages, and conversion of their contents to the form that the chat template reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from slotline.registry.config.faults import similar
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

Message = dict[str, Any]

_EXAMPLE = "give [{'role': 'user', 'content': '...'}]"


@frozen(kw_only=True)
class ContentFormat:
    """The form in which a template reads contents.

    Attributes:
        parts: True if it reads lists of parts.
        texts: True if it reads texts.
        placeholders: the placeholder of an item in a text, by modality. Empty for a text-only model.
        modalities: kinds of items that the model takes.
    """

    parts: bool
    texts: bool
    placeholders: Mapping[str, str] = field(factory=dict)
    modalities: frozenset[str] = frozenset()

    def of(self, message: Message) -> Message:
        """Return the message with its content as the template reads it.

        Raises:
            RequestError: if a part cannot be read.
        """
        content = message.get("content")
        if isinstance(content, list):
            parts = [self._checked(part) for part in content]
            return message | {"content": parts if self.parts else self._text(parts)}
        if isinstance(content, str) and not self.texts:
            return message | {"content": [{"type": "text", "text": content}]}
        return message

    def _checked(self, part: Any) -> Message:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise RequestError(f"{safe_repr(part)} is no part of a content", fix="give {'type': 'text', 'text': '...'}")
        kind = part.get("type")
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise RequestError(
                    f"a text part has text={safe_repr(part.get('text'))}", fix="give it a string as 'text'"
                )
        elif not isinstance(kind, str) or kind not in self.modalities:
            takes = ", ".join(["text", *sorted(self.modalities)])
            raise RequestError(
                f"a part of type {safe_repr(kind)} cannot be read{similar(str(kind), ['text', *self.modalities])}",
                fix=f"this model takes parts of type {takes}, as {{'type': 'text', 'text': '...'}}",
            )
        elif kind not in part:
            raise RequestError(
                f"a part of type {kind!r} has the keys {', '.join(map(safe_repr, part))} and no {kind!r}",
                fix=f"give {{'type': {kind!r}, {kind!r}: ...}}",
            )
        return dict(part)

    def _text(self, parts: Sequence[Message]) -> str:
        """Return the parts as one text, joined as in vLLM: placeholders that the text lacks come first."""
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        lines = []
        for kind, placeholder in self.placeholders.items():
            wanted = sum(part["type"] == kind for part in parts)
            lines += [placeholder] * (wanted - text.count(placeholder))
        return "\n".join([*lines, text] if text or not lines else lines)


def as_conversations(messages: Any) -> list[list[Message]]:
    """Return a list of conversations with checked messages. A single conversation becomes a list of one.

    Raises:
        RequestError: naming the value that is not a conversation.
    """
    listed = _listed(messages, "messages")
    if not listed:
        raise RequestError("the conversation has no messages", fix="give at least one message")
    if isinstance(listed[0], Mapping):
        return [_conversation(listed)]
    return [_conversation(_listed(one, f"conversation {index}")) for index, one in enumerate(listed)]


def _listed(given: Any, what: str) -> list[Any]:
    if isinstance(given, Mapping):
        raise RequestError(
            f"{what} is one message and no list: {safe_repr(given)}", fix=f"put it into a list, and {_EXAMPLE}"
        )
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise RequestError(f"{what}={safe_repr(given)} is no list of messages", fix=_EXAMPLE)
    try:
        return list(given)
    except TypeError as error:  # an array without dimensions claims to be iterable
        raise RequestError(f"{what}={safe_repr(given)} is no list of messages", fix=_EXAMPLE) from error


def _conversation(messages: list[Any]) -> list[Message]:
    if not messages:
        raise RequestError("the conversation has no messages", fix="give at least one message")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"message {index} is no mapping: {safe_repr(message)}", fix=_EXAMPLE)
    read = {key: value for key, value in message.items() if value is not None}  # as in transformers: None is absent
    if not isinstance(read.get("role"), str):
        raise RequestError(
            f"message {index} has role={safe_repr(message.get('role'))}", fix="give each message a 'role', as 'user'"
        )
    content = read.get("content")
    if isinstance(content, tuple):
        read["content"] = list(content)
    elif content is not None and not isinstance(content, str | list):
        raise RequestError(
            f"message {index} has content={safe_repr(content)}, which is neither text nor a list of parts",
            fix="give a string, or [{'type': 'text', 'text': '...'}]",
        )
    return read


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value in the types of JSON, as templates see it. Other objects are replaced by the name of their type.

    Templates come from checkpoints and must not call the methods of an image or array.

    Raises:
        RequestError: if the value is nested too deeply, or contains itself.
    """
    if depth > 200:
        raise RequestError("a message is nested more than 200 levels deep", fix="give plain texts, lists and mappings")
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, np.generic):
        return plain(value.item(), depth)
    if isinstance(value, Mapping):
        return {plain(key, depth + 1): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item, depth + 1) for item in value) if type(value) in (list, tuple) else list(value)
    return f"<{type(value).__name__}>"
