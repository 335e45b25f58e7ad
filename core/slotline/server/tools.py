"""What is new of a tool call, in the form of chats."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from slotline.llm.turns import Turn
from slotline.registry.contracts import ToolArgumentsDelta, ToolCallBegin


class FunctionCallDelta(Struct):
    """The name of a call, and what is new of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct):
    """What is new of a call."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


def call_delta(turn: Turn, event: ToolCallBegin | ToolArgumentsDelta) -> ToolCallDelta:
    """Return what an event of an output says of a call."""
    if isinstance(event, ToolArgumentsDelta):
        return ToolCallDelta(event.index, FunctionCallDelta(arguments=event.text))
    call = turn.calls[event.index]
    return ToolCallDelta(event.index, FunctionCallDelta(event.name), call.id, call.type)
