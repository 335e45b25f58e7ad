"""Input of `/v1/responses`: items of a conversation, and the messages that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from attrs import define, field

from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr
from slotline.server.errors import HttpError
from slotline.server.fields import Fields

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Fields, tag_field="type", tag="input_text"):
    """A text of a user, a system or a tool."""

    text: str


class InputImage(Fields, tag_field="type", tag="input_image"):
    """An image, as a data URL or a URL to fetch it from."""

    image_url: str
    detail: Literal["auto"] | None = None
    file_id: None = None


class OutputText(Fields, tag_field="type", tag="output_text"):
    """A text of the assistant. The other fields are those of an answer, and say nothing to the model."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Fields, tag_field="type", tag="refusal"):
    """Words with which the assistant refused."""

    refusal: str


class SummaryText(Fields, tag_field="type", tag="summary_text"):
    """A summary of reasoning."""

    text: str


class ReasoningText(Fields, tag_field="type", tag="reasoning_text"):
    """A text of reasoning."""

    text: str


InputPart = InputText | InputImage | OutputText | Refusal


class MessageItem(Fields, tag_field="type", tag="message"):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    id: str | None = None
    status: Status | None = None
    phase: None = None


class FunctionCallItem(Fields, tag_field="type", tag="function_call"):
    """A call that the assistant made."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: None = None
    caller: None = None


class FunctionCallOutputItem(Fields, tag_field="type", tag="function_call_output"):
    """What a call returned."""

    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: Status | None = None
    caller: None = None


class ReasoningItem(Fields, tag_field="type", tag="reasoning"):
    """Reasoning of the assistant. Its content counts, or else its summary."""

    id: str | None = None
    summary: list[SummaryText] = msgspec.field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: Status | None = None


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class _Input(Fields):
    input: list[InputItem]


def as_conversation(given: str | Sequence[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Return an input as messages of the chat's form. Instructions come first.

    Raises:
        msgspec.ValidationError: if an item is none of those that are served.
        HttpError, RequestError: if a call's output comes without the call, or there is no item.
    """
    conversation = Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        conversation.messages.append({"role": "user", "content": given})
        return conversation.messages
    if not given:
        raise RequestError("input is an empty list", fix="give a text, or a list of items")
    named = [{"type": "message", **item} if "role" in item else item for item in given]
    for index, item in enumerate(msgspec.convert({"input": named}, _Input).input):
        conversation.add(index, item)
    return conversation.messages


@define(eq=False)
class Conversation:
    """Messages that grow by items. What the assistant thought, said and called in a row is one message.

    Attributes:
        names: of the functions, by the ids of their calls.
    """

    messages: list[dict[str, Any]] = field(factory=list)
    names: dict[str, str] = field(factory=dict)

    def add(self, index: int, item: InputItem) -> None:
        """Add an item of the input by its number.

        Raises:
            HttpError: if it is the output of a call that there is not.
        """
        if isinstance(item, FunctionCallItem):
            self.names[item.call_id] = item.name
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            self._assistant().setdefault("tool_calls", []).append(call)
        elif isinstance(item, FunctionCallOutputItem):
            self.messages.append(self._output(index, item))
        elif isinstance(item, ReasoningItem):
            parts = item.content or item.summary
            self._assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = "\n".join(
                part.text for part in parts
            )
        elif item.role == "assistant":
            self._assistant("content", "tool_calls")["content"] = _content(item.content)
        else:
            self.messages.append({"role": item.role, "content": _content(item.content)})

    def _assistant(self, *without: str) -> dict[str, Any]:
        """Return the assistant's message at the end, or a new one if there is none without these fields."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in without):
            self.messages.append(last := {"role": "assistant", "content": ""})
        return last

    def _output(self, index: int, item: FunctionCallOutputItem) -> dict[str, Any]:
        if (name := self.names.get(item.call_id)) is None:
            raise HttpError(
                400,
                f"input[{index}] is the output of the call {safe_repr(item.call_id)}, and no function_call with this "
                "call_id is before it; this server keeps no responses, so send the call as well",
                param=f"input[{index}].call_id",
                code="invalid_value",
            )
        return {"role": "tool", "tool_call_id": item.call_id, "name": name, "content": _content(item.output)}


def _content(given: str | Sequence[InputPart]) -> str | list[dict[str, Any]]:
    return given if isinstance(given, str) else [_part(part) for part in given]


def _part(part: InputPart) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "text", "text": part.refusal if isinstance(part, Refusal) else part.text}
