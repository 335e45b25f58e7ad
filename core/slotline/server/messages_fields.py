"""The body of `/v1/messages`: fields, tools, and blocks as messages of the chat's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from attrs import define, field

from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr
from slotline.server.errors import HttpError, unsupported
from slotline.server.fields import Fields
from slotline.server.ranges import Factor, Messages, Positive, Scale, Seed, Share, Text, TopK, TopP


class Thinking(Fields):
    """Whether reasoning is shown. The budget is not enforced, since `max_tokens` bounds reasoning and text together."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: None = None


class ToolChoice(Fields):
    """Which tools are called: ``auto``, ``any`` for at least one, ``tool`` for one by its name, or ``none``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(Fields):
    """A function that may be called. Its input is held to the schema only if `strict` is true."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, which templates and parsers read."""
        values = {"description": self.description, "strict": self.strict}
        more = {name: one for name, one in values.items() if one is not None}
        return {"type": "function", "function": {"name": self.name, "parameters": self.input_schema, **more}}


class OutputFormat(Fields, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    schema: dict[str, Any]


class OutputConfig(Fields):
    """Form of the answer, and the effort of reasoning, which is for the chat template."""

    format: OutputFormat | None = None
    effort: str | None = None


class _Tools(Fields):
    tools: list[Tool]


class MessagesFields(Fields, kw_only=True):
    """The body of a request. The remaining fields are slotline's own."""

    messages: Messages
    max_tokens: Positive
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    temperature: Scale | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    seed: Seed | None = None
    min_p: Share | None = None
    repetition_penalty: Factor | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None


def tools_for_chat(given: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form.

    Raises:
        HttpError: for a tool of Anthropic's own, since this server runs no tools.
        msgspec.ValidationError: for a tool that is wrong.
    """
    for index, tool in enumerate(given or ()):
        if (kind := tool.get("type") or "custom") != "custom":
            raise HttpError(
                400,
                f"tools[{index}] has type {safe_repr(kind)}; this server runs no tools by itself, so give functions",
                param=f"tools[{index}].type",
                code="unsupported",
            )
    return [tool.for_chat() for tool in msgspec.convert({"tools": given or []}, _Tools).tools]


def choice_for_chat(choice: ToolChoice | None, tools: Sequence[dict[str, Any]]) -> Any:
    """Return a choice in OpenAI's form.

    Raises:
        RequestError: if it names none of the tools.
    """
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None or not tools else choice.type
    names = [tool["function"]["name"] for tool in tools]
    if choice.type == "any" and names:
        return "required"
    if choice.name not in names:
        raise RequestError(
            f"tool_choice of type {choice.type!r} with name={safe_repr(choice.name)} fits none of the tools",
            fix=f"name one of them: {', '.join(names) or 'there are none'}",
        )
    return {"type": "function", "function": {"name": choice.name}}


def as_chat(messages: Sequence[dict[str, Any]], system: str | Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. A tool's result becomes a message of its own.

    Raises:
        HttpError, RequestError: if a block cannot be read, or a result belongs to no call.
    """
    conversation = _Conversation()
    if system:
        conversation.messages.append({"role": "system", "content": _system(system)})
    for message in messages:
        conversation.add(message)
    return conversation.messages


@define(eq=False)
class _Conversation:
    """Messages that grow. `names` has the functions by the ids of their calls."""

    messages: list[dict[str, Any]] = field(factory=list)
    names: dict[str, str] = field(factory=dict)

    def add(self, message: dict[str, Any]) -> None:
        blocks = message.get("content")
        if not isinstance(blocks, list):
            self.messages.append(message)
            return
        begun: dict[str, Any] | None = None
        for block in blocks:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "tool_result":
                self.messages.append(self._result(block))
                begun = None
                continue
            if begun is None:
                self.messages.append(begun := {**message, "content": []})
            if kind == "thinking":
                begun["reasoning_content"] = begun.get("reasoning_content", "") + str(block.get("thinking", ""))
            elif kind == "tool_use":
                begun.setdefault("tool_calls", []).append(self._call(block))
            else:
                begun["content"].append(_part(block))
        if begun is not None and not begun["content"]:
            begun["content"] = ""

    def _call(self, block: dict[str, Any]) -> dict[str, Any]:
        name, given = block.get("name"), block.get("input")
        if not isinstance(name, str) or not isinstance(given, dict) or not isinstance(block.get("id"), str):
            raise RequestError(
                f"a tool_use block has name={safe_repr(name)} and input={safe_repr(given)}",
                fix="send back the block as the answer had it, with id, name and input",
            )
        self.names[block["id"]] = name
        return {"id": block["id"], "type": "function", "function": {"name": name, "arguments": given}}

    def _result(self, block: dict[str, Any]) -> dict[str, Any]:
        called = block.get("tool_use_id")
        if not isinstance(called, str) or called not in self.names:
            raise RequestError(
                f"a tool_result has tool_use_id={safe_repr(called)}, and no tool_use with this id is before it",
                fix="send the whole conversation, with the answer's tool_use block",
            )
        content = block.get("content") or ""
        parts = [_part(one) for one in content] if isinstance(content, list) else [{"type": "text", "text": content}]
        if block.get("is_error"):
            parts.insert(0, {"type": "text", "text": "Error:"})
        plain = len(parts) == 1 and parts[0].get("type") == "text"
        text = parts[0]["text"] if plain else parts
        return {"role": "tool", "tool_call_id": called, "name": self.names[called], "content": text}


def _part(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "image" and isinstance(source := block.get("source"), dict):
        if source.get("type") != "base64":
            raise RequestError("an image's source is no base64", fix="send the image itself; nothing is fetched")
        url = f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "text":
        return {"type": "text", "text": block.get("text")}  # without marks for a cache that is always on
    if kind == "redacted_thinking":
        raise unsupported("redacted_thinking")
    return block


def _system(given: str | Sequence[dict[str, Any]]) -> str:
    if isinstance(given, str):
        return given
    texts = [block.get("text") for block in given if block.get("type") == "text"]
    if len(texts) != len(given) or not all(isinstance(text, str) for text in texts):
        raise RequestError("system has a block that is no text", fix="give a text, or blocks of type text")
    return "\n".join(map(str, texts))
