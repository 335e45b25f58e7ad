"""Conversations of `/v1/messages`: blocks, and the messages that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import define, field

from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr
from slotline.server.fields import Fields


class Base64Source(Fields, tag_field="type", tag="base64"):
    """The bytes of a file."""

    data: str
    media_type: str = "image/png"


class URLSource(Fields, tag_field="type", tag="url"):
    """Where a file is fetched from, if `multimodal.urls` allows it."""

    url: str


class TextIn(Fields, tag_field="type", tag="text"):
    """A text. Marks for the cache say nothing, since it is always on."""

    text: str
    cache_control: Any = None
    citations: None = None


class ImageIn(Fields, tag_field="type", tag="image"):
    """An image."""

    source: Base64Source | URLSource
    cache_control: Any = None


class ThinkingIn(Fields, tag_field="type", tag="thinking"):
    """Reasoning of the assistant. Its signature is not looked at."""

    thinking: str
    signature: str | None = None


class ToolUseIn(Fields, tag_field="type", tag="tool_use"):
    """A call that the assistant made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: None = None
    toolset_name: None = None


class ToolResultIn(Fields, tag_field="type", tag="tool_result"):
    """What a call returned."""

    tool_use_id: str
    content: str | list[TextIn | ImageIn] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: None = None


BlockIn = TextIn | ImageIn | ThinkingIn | ToolUseIn | ToolResultIn


class MessageIn(Fields):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[BlockIn]


def as_chat(messages: Sequence[MessageIn], system: str | Sequence[TextIn] | None) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. A tool's result becomes a message of its own.

    Raises:
        RequestError: if there is no message, or a result belongs to no call.
    """
    if not messages:
        raise RequestError("messages is an empty list", fix="give [{'role': 'user', 'content': '...'}]")
    conversation = _Conversation()
    if system:
        text = system if isinstance(system, str) else "\n".join(block.text for block in system)
        conversation.messages.append({"role": "system", "content": text})
    for message in messages:
        conversation.add(message)
    return conversation.messages


@define(eq=False)
class _Conversation:
    """Messages that grow. `names` has the functions by the ids of their calls."""

    messages: list[dict[str, Any]] = field(factory=list)
    names: dict[str, str] = field(factory=dict)

    def add(self, message: MessageIn) -> None:
        if isinstance(message.content, str):
            self.messages.append({"role": message.role, "content": message.content})
            return
        begun: dict[str, Any] | None = None
        for block in message.content:
            if isinstance(block, ToolResultIn):
                self.messages.append(self._result(block))
                begun = None
                continue
            if begun is None:
                self.messages.append(begun := {"role": message.role, "content": []})
            if isinstance(block, ThinkingIn):
                begun["reasoning_content"] = begun.get("reasoning_content", "") + block.thinking
            elif isinstance(block, ToolUseIn):
                self.names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                begun.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            else:
                begun["content"].append(_part(block))
        if begun is not None and not begun["content"]:
            begun["content"] = ""

    def _result(self, block: ToolResultIn) -> dict[str, Any]:
        if (name := self.names.get(block.tool_use_id)) is None:
            raise RequestError(
                f"a tool_result has tool_use_id={safe_repr(block.tool_use_id)}, and no tool_use with this id is "
                "before it",
                fix="send the whole conversation, with the answer's tool_use block",
            )
        content = block.content or ""
        blocks = [TextIn(text=content)] if isinstance(content, str) else content
        parts = [_part(one) for one in ([TextIn(text="Error:")] if block.is_error else []) + blocks]
        plain = len(parts) == 1 and isinstance(blocks[-1], TextIn)
        return {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "name": name,
            "content": parts[0]["text"] if plain else parts,
        }


def _part(block: TextIn | ImageIn) -> dict[str, Any]:
    if isinstance(block, TextIn):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if isinstance(source, URLSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}
