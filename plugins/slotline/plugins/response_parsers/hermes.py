"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json

from slotline.plugins.response_parsers.parser import THINK, FormParser, Tag, thinks_by_itself
from slotline.plugins.response_parsers.reader import HEAD, Reader, unescaped
from slotline.registry.contracts import ResponseParserContext

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesReader(Reader):
    """Reader of content with calls between two markers."""

    def content(self) -> bool:
        """Pass on content until a call."""
        return self.until((_BEGIN,) if self.request.calls else (), self.say) is not None and self.go(self.head)

    def head(self) -> bool:
        """Wait for a call's name, or for its end if its name does not come first."""
        end, found = self.buffer.find(_END), HEAD.match(self.buffer)
        if found and not 0 <= end < found.end():
            self.begin(unescaped(found[1]))
            self.buffer = self.buffer[found.end() :]
            return self.go(self.arguments)
        if end < 0 and not self.final:
            return False
        if end < 0:
            text, closed, self.buffer = self.buffer, "", ""
        else:
            text, closed, self.buffer = self.buffer[:end], _END, self.buffer[end + len(_END) :]
        self.fresh = self.whole_call(text)
        if not self.fresh:
            self.say(f"{_BEGIN}{text}{closed}")
        return self.go(self.content)

    def arguments(self) -> bool:
        """Pass on the arguments of a call."""
        return self.take_object((_END,)) and self.go(self.drop_until(_END, self.content))


def _tag(name: str) -> Tag:
    return Tag(_BEGIN, f'{_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{_END}")


def build(context: ResponseParserContext) -> FormParser:
    """Build the parser."""
    return FormParser(reader=lambda request: HermesReader(request, THINK), thinks=thinks_by_itself(context), tag=_tag)
