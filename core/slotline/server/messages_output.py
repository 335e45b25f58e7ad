"""Blocks of an answer of `/v1/messages`, and the events that tell how they grow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import define, field
from msgspec import Struct

from slotline.core.api.outputs import CompletionOutput
from slotline.llm.turns import Turn, read_arguments
from slotline.registry.contracts import ContentDelta, ReasoningDelta, ResponseEvent, ToolArgumentsDelta, ToolCallBegin

Event = tuple[str, dict[str, Any]]
"""Name of an event, and its fields without the type."""


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    """A text of the turn."""

    text: str = ""


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of the turn. It is plain text, so it has no signature."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call. Arguments that are no object, since they broke off, are the text `INVALID_JSON` of the input."""

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


@define(eq=False, kw_only=True)
class BlockWriter:
    """Writer of the blocks of one answer.

    Attributes:
        turn: reads the answer's text.
        blocks: those so far. Only the last one may grow.
    """

    turn: Turn
    blocks: list[Block] = field(factory=list)

    def read(self, one: CompletionOutput) -> Iterator[Event]:
        """Yield the events of an output, or of what is new of it."""
        for event in self.turn.read(one):
            yield from self._read(event)
        if one.finish_reason is not None:
            if not self.blocks:
                yield from self._begin(TextBlock())
            yield self._end()

    def _read(self, event: ResponseEvent) -> Iterator[Event]:
        block = self.blocks[-1] if self.blocks else None
        if isinstance(event, ToolCallBegin):
            yield from self._begin(ToolUseBlock(id=self.turn.calls[event.index].id, name=event.name))
        elif isinstance(event, ToolArgumentsDelta):
            yield self._delta("input_json_delta", partial_json=event.text)
        elif isinstance(event, ReasoningDelta):
            if not isinstance(block, ThinkingBlock):
                yield from self._begin(block := ThinkingBlock())
            block.thinking += event.text
            yield self._delta("thinking_delta", thinking=event.text)
        else:
            assert isinstance(event, ContentDelta)
            if not isinstance(block, TextBlock):
                yield from self._begin(block := TextBlock())
            block.text += event.text
            yield self._delta("text_delta", text=event.text)

    def _begin(self, block: Block) -> Iterator[Event]:
        if self.blocks:
            yield self._end()
        self.blocks.append(block)
        yield "content_block_start", {"index": len(self.blocks) - 1, "content_block": block}

    def _delta(self, kind: str, **values: str) -> Event:
        return "content_block_delta", {"index": len(self.blocks) - 1, "delta": {"type": kind, **values}}

    def _end(self) -> Event:
        block = self.blocks[-1]
        if isinstance(block, ToolUseBlock):
            number = sum(isinstance(one, ToolUseBlock) for one in self.blocks) - 1
            block.input = _input(self.turn.calls[number].function.arguments)
        return "content_block_stop", {"index": len(self.blocks) - 1}


def _input(arguments: str) -> dict[str, Any]:
    found = read_arguments(arguments)
    return {"INVALID_JSON": arguments} if found is None else found
