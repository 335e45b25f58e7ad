"""The body of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr
from slotline.server.errors import HttpError, unsupported
from slotline.server.fields import (
    Fields,
    JsonSchema,
    ResponseFormat,
    SamplingFields,
    as_long_as_possible,
    sampling_params,
)
from slotline.server.ranges import Natural, Positive

_LOGPROBS = "message.output_text.logprobs"


class PlainText(Fields, tag_field="type", tag="text"):
    """Any text."""


class JsonObject(Fields, tag_field="type", tag="json_object"):
    """Any object of JSON."""


class JsonWithSchema(Fields, tag_field="type", tag="json_schema"):
    """JSON that follows a schema. It is always held to it."""

    name: str
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None


class TextConfig(Fields):
    """The form of the answer's text."""

    format: PlainText | JsonObject | JsonWithSchema | None = None
    verbosity: None = None


class ReasoningConfig(Fields):
    """Options of reasoning. The effort is for the chat template. Reasoning is shown as it is, so it has no summary."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class FunctionTool(Fields, tag_field="type", tag="function"):
    """A function that may be called. Its arguments are held to its schema only if `strict` is true."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the tool in the form of chats, which templates and parsers read."""
        values = {name: getattr(self, name) for name in ("name", "description", "parameters", "strict")}
        return {"type": "function", "function": {name: one for name, one in values.items() if one is not None}}


class NamedFunction(Fields, tag_field="type", tag="function"):
    """A function by its name."""

    name: str


class AllowedTools(Fields, tag_field="type", tag="allowed_tools"):
    """The functions that may be called, of those that are given."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


Choice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools


class ResponsesFields(SamplingFields, kw_only=True):
    """The body of a request. Where OpenAI has no such field, it is one of slotline's own."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Natural | None = None
    include: list[str] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: int | None = None
    prompt_cache_retention: str | None = None
    context_management: Any = None

    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Tools(Fields):
    tools: list[FunctionTool]


_UNSERVED = (
    "n",
    "best_of",
    "response_format",
    "prompt_logprobs",
    "background",
    "prompt",
    "max_tool_calls",
    "prompt_cache_retention",
    "context_management",
)
"""Fields that are refused if they ask for anything."""
_STORED = ("previous_response_id", "conversation", "store")
"""Fields that ask for something stored."""
_ONLY = {"truncation": ("disabled",), "service_tier": ("auto", "default")}
"""The values that are served of fields that have others."""


def checked_params(fields: ResponsesFields, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters. Without a limit the answer may take what the model's length leaves.

    Args:
        fields: the request.
        defaults: those of the model.

    Raises:
        HttpError, RequestError: if a field or its value is not served.
    """
    _refuse(fields)
    shown = _LOGPROBS in (fields.include or ())
    if fields.top_logprobs and not shown:
        raise RequestError(f"top_logprobs={fields.top_logprobs} alone", fix=f"put {_LOGPROBS!r} into include")
    if (form := fields.text and fields.text.format) and not isinstance(form, PlainText):
        schema = JsonSchema(schema=form.schema) if isinstance(form, JsonWithSchema) else None
        kind: Literal["json_object", "json_schema"] = "json_object" if schema is None else "json_schema"
        fields.response_format = ResponseFormat(kind, schema)
    params = sampling_params(
        fields,
        max_tokens=fields.max_output_tokens,
        logprobs=max(1, fields.top_logprobs or 0) if shown else None,
    )
    if fields.max_output_tokens is None and "max_tokens" not in defaults:
        return as_long_as_possible(params)
    return params


def _refuse(fields: ResponsesFields) -> None:
    """Refuse what is not served.

    Raises:
        HttpError: naming the field.
    """
    for name in _UNSERVED:
        if getattr(fields, name):
            raise unsupported(name)
    for name in _STORED:
        if getattr(fields, name):
            raise HttpError(
                400,
                f"{name} is not supported: this server stores no responses; leave it out, and send the whole "
                "conversation as input",
                param=name,
                code="unsupported",
            )
    for name, served in _ONLY.items():
        if (given := getattr(fields, name)) not in (None, *served):
            raise _unserved(name, given, " or ".join(map(repr, served)))
    for index, given in enumerate(fields.include or ()):
        if given != _LOGPROBS:
            raise _unserved(f"include[{index}]", given, f"{_LOGPROBS!r}; reasoning is always shown in plain text")
    if fields.stream_options and (fields.stream_options.include_usage or fields.stream_options.continuous_usage_stats):
        raise RequestError("stream_options with include_usage", fix="leave it out; usage is in the last event")


def _unserved(name: str, given: Any, served: str) -> HttpError:
    message = f"{name}={safe_repr(given)} is not supported by this server; leave it out, or give {served}"
    return HttpError(400, message, param=name, code="unsupported")


def read_tools(fields: ResponsesFields) -> list[FunctionTool]:
    """Return the functions of a request.

    Raises:
        HttpError: for a tool that is no function, since this server runs no tools.
        msgspec.ValidationError: for a function that is wrong.
    """
    for index, tool in enumerate(fields.tools or ()):
        if (kind := tool.get("type")) != "function":
            raise HttpError(
                400,
                f"tools[{index}] has type {safe_repr(kind)}; this server runs no tools by itself, so give functions",
                param=f"tools[{index}].type",
                code="unsupported",
            )
    return msgspec.convert({"tools": fields.tools or []}, _Tools).tools


def for_chat(tools: Sequence[FunctionTool], choice: Choice | None) -> tuple[list[dict[str, Any]], Any]:
    """Return tools and a choice in the form of chats. Of tools that are not allowed nothing is said to the model.

    Raises:
        HttpError: if one is allowed that is none of the tools.
    """
    if isinstance(choice, NamedFunction):
        return [tool.for_chat() for tool in tools], {"type": "function", "function": {"name": choice.name}}
    if not isinstance(choice, AllowedTools):
        return [tool.for_chat() for tool in tools], choice
    names = {tool.name for tool in choice.tools}
    if not names or (unknown := names - {tool.name for tool in tools}):
        raise HttpError(
            400,
            f"tool_choice allows {safe_repr(min(unknown)) if names else 'no tool'}; name some of tools",
            param="tool_choice.tools",
            code="invalid_value",
        )
    return [tool.for_chat() for tool in tools if tool.name in names], choice.mode
