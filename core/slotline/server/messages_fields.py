"""The body of `/v1/messages`: its fields and tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr
from slotline.server.errors import HttpError
from slotline.server.fields import Fields
from slotline.server.messages_blocks import MessageIn, TextIn
from slotline.server.ranges import Factor, Positive, Scale, Seed, Share, Text, TopK, TopP


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

    messages: Annotated[list[MessageIn], Meta(extra_json_schema={"minItems": 1})]
    max_tokens: Positive
    model: str | None = None
    system: str | list[TextIn] | None = None
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
