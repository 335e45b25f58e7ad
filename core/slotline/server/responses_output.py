"""Output of `/v1/responses`: items, and the events that tell how they grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from attrs import define, field
from msgspec import Struct

from slotline.core.api.outputs import CompletionOutput
from slotline.llm.turns import Turn
from slotline.registry.contracts import ContentDelta, ReasoningDelta, ResponseEvent, ToolArgumentsDelta, ToolCallBegin
from slotline.server.outputs import ContentLogprob, chat_logprobs

Event = tuple[str, dict[str, Any]]
"""Name of an event, and its fields without type and sequence number."""


class TextPart(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """A text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningPart(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A text of reasoning."""

    text: str = ""


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[TextPart] = []


class OutputReasoning(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the assistant."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningPart] = []


class OutputCall(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputCall


@define(eq=False, kw_only=True)
class ItemWriter:
    """Writer of the items of one answer.

    Attributes:
        turn: reads the answer's text.
        top: how many of the most likely tokens are shown in each place. None for no log-probabilities.
        items: those so far. Only the last one may grow.
    """

    turn: Turn
    top: int | None
    items: list[OutputItem] = field(factory=list)
    _pending: list[ContentLogprob] = field(factory=list, init=False)

    def read(self, one: CompletionOutput) -> Iterator[Event]:
        """Yield the events of an output, or of what is new of it."""
        if self.top is not None:
            self._pending += chat_logprobs(one.logprobs or (), self.top).content
        for event in self.turn.read(one):
            yield from self._read(event)
        if one.finish_reason is not None:
            if not self.items:
                yield from self._begin(OutputMessage(id=_id("msg")), [TextPart()])
            if isinstance(message := self._open(), OutputMessage) and self._pending:
                yield self._more_text(message, "")
            yield from self.end("completed" if one.finish_reason == "stop" else "incomplete")

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events that end the last item, if it is open."""
        if (item := self._open()) is None:
            return
        if isinstance(item, OutputCall):
            yield self._event("function_call_arguments.done", item, name=item.name, arguments=item.arguments)
        elif isinstance(item, OutputReasoning):
            yield self._event("reasoning_text.done", item, content_index=0, text=item.content[0].text)
        else:
            part = item.content[0]
            yield self._event("output_text.done", item, content_index=0, text=part.text, logprobs=part.logprobs)
        if not isinstance(item, OutputCall):
            yield self._event("content_part.done", item, content_index=0, part=item.content[0])
        item.status = status
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _open(self) -> OutputItem | None:
        return self.items[-1] if self.items and self.items[-1].status == "in_progress" else None

    def _event(self, name: str, item: OutputItem, /, **values: Any) -> Event:
        return f"response.{name}", {"item_id": item.id, "output_index": len(self.items) - 1, **values}

    def _read(self, event: ResponseEvent) -> Iterator[Event]:
        """Yield what an event of the text says. Only what begins another item ends the last one."""
        item = self._open()
        if isinstance(event, ContentDelta):
            if not isinstance(item, OutputMessage):
                yield from self._begin(item := OutputMessage(id=_id("msg")), [TextPart()])
            yield self._more_text(item, event.text)
            return
        self._pending.clear()  # these tokens are no text of a message
        if isinstance(event, ToolArgumentsDelta):
            assert isinstance(item, OutputCall)
            item.arguments += event.text
            yield self._event("function_call_arguments.delta", item, delta=event.text)
        elif isinstance(event, ToolCallBegin):
            call_id = self.turn.calls[event.index].id
            yield from self._begin(OutputCall(id=_id("fc"), call_id=call_id, name=event.name))
        else:
            assert isinstance(event, ReasoningDelta)
            if not isinstance(item, OutputReasoning):
                yield from self._begin(item := OutputReasoning(id=_id("rs")), [ReasoningPart()])
            item.content[0].text += event.text
            yield self._event("reasoning_text.delta", item, content_index=0, delta=event.text)

    def _begin(self, item: OutputItem, content: Sequence[Any] = ()) -> Iterator[Event]:
        """Yield the events that end the last item and begin another one."""
        yield from self.end("completed")
        self.items.append(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": item}
        for part in content:
            assert not isinstance(item, OutputCall)
            item.content = [part]
            yield self._event("content_part.added", item, content_index=0, part=part)

    def _more_text(self, item: OutputMessage, text: str) -> Event:
        logprobs, self._pending = self._pending, []
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        return self._event("output_text.delta", item, content_index=0, delta=text, logprobs=logprobs)


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
