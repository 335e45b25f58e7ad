"""gpt-oss: messages in channels. `analysis` is reasoning, `final` content, and a recipient `functions.name` a call."""

from __future__ import annotations

import re
from collections.abc import Callable

from attrs import frozen

from slotline.plugins.response_parsers.json_calls import JsonCallsReader, list_schema
from slotline.plugins.response_parsers.reader import Reader
from slotline.registry.contracts import (
    ResponseParserContext,
    ResponseRequest,
    ResponseStream,
    StructuredOutputsParams,
)

_MESSAGE, _FINAL = "<|message|>", "<|channel|>final<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_BEGINNINGS = ("<|channel|>", "<|start|>", "<|message|>", "to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyReader(Reader):
    """Reader of messages. Text that does not begin as one is content."""

    def __init__(self, request: ResponseRequest) -> None:
        super().__init__(request)
        self.state = self.content if request.prompt.rstrip().endswith(_FINAL) else self.begins

    def begins(self) -> bool:
        """Decide whether the text begins a message."""
        text = self.buffer.lstrip()
        if any(text.startswith(one) for one in _BEGINNINGS):
            return self.go(self.header)
        if any(one.startswith(text) for one in _BEGINNINGS) and not self.final:
            return False
        return self.go(self.content)

    def header(self) -> bool:
        """Wait for the beginning of a message's text, and read to whom it is."""
        head, message, rest = self.buffer.partition(_MESSAGE)
        if not message:
            return False
        self.buffer = rest
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        if recipient and self.request.calls:
            self.begin(recipient[1])
            return self.go(self.message(self.argue))
        if channel is not None and channel[1] == "analysis":
            return self.go(self.message(self.reason))
        return self.go(self.message(self.say))

    def message(self, emit: Callable[[str], None]) -> Callable[[], bool]:
        """Return a state that passes on a message's text until its end."""

        def state() -> bool:
            if self.until(_ENDS, emit) is None:
                return False
            self.fresh = False
            return self.go(self.header)

        return state


@frozen
class HarmonyParser:
    """Parser of messages in channels. Required calls are a list in JSON."""

    def start(self, request: ResponseRequest) -> ResponseStream:
        """See the contract."""
        required = request.calls and request.tool_choice in ("required", "named")
        return JsonCallsReader(request) if required else HarmonyReader(request)

    def constraint(self, request: ResponseRequest) -> StructuredOutputsParams | None:
        """See the contract."""
        required = request.tool_choice in ("required", "named")
        return StructuredOutputsParams(json=list_schema(request)) if required else None

    def reasoning_end(self, request: ResponseRequest) -> str | None:
        """See the contract: what stands in the channel `final` is the content. Required calls begin at once."""
        required = request.calls and request.tool_choice in ("required", "named")
        return None if required or request.prompt.rstrip().endswith(_FINAL) else _FINAL


def build(context: ResponseParserContext) -> HarmonyParser:
    """Build the parser."""
    return HarmonyParser()
