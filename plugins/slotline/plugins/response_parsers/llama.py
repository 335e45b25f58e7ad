"""Llama 3: calls are JSON objects that are the whole answer, perhaps behind `<|python_tag|>` and divided by `;`."""

from __future__ import annotations

import json

from slotline.plugins.response_parsers.parser import FormParser, Tag
from slotline.plugins.response_parsers.reader import HEAD, Reader, unescaped
from slotline.registry.contracts import ResponseParserContext, ResponseRequest

_TAG = "<|python_tag|>"
_BEGINNINGS = ('{"name":"', '{"type":"function","name":"')


def _may_be_call(text: str) -> bool:
    """Return True if a text may be the beginning of a call."""
    start = "".join(text[:200].split())
    return any(start.startswith(one) or one.startswith(start) for one in _BEGINNINGS)


class LlamaReader(Reader):
    """Reader of calls without markers around them. Anything else is content from its beginning on."""

    def __init__(self, request: ResponseRequest) -> None:
        super().__init__(request)
        self._tagged = False
        self.state = self.begins if request.calls else super().content

    def begins(self) -> bool:
        """Decide whether the answer begins with a call."""
        text = self.buffer.lstrip()
        if text.startswith(_TAG):
            self.buffer, self._tagged = text[len(_TAG) :], True
            return self.go(self.call)
        if not self.final and (not text or (len(text) < len(_TAG) and _TAG.startswith(text))):
            return False
        return self.go(self.call if text.startswith("{") else self.content)

    def content(self) -> bool:
        """Pass on content until a tag."""
        if self.until((_TAG,) if self.request.calls else (), self.say) is None:
            return False
        self._tagged = True
        return self.go(self.call)

    def call(self) -> bool:
        """Wait for a call's name. What turns out to be no call is content."""
        if found := HEAD.match(self.buffer):
            self.begin(unescaped(found[1]))
            self.buffer = self.buffer[found.end() :]
            return self.go(self.arguments)
        if _may_be_call(self.buffer) and not self.final:
            return False
        if not self.final or not self.whole_call(self.buffer):
            self.buffer = f"{_TAG if self._tagged else ''}{self.buffer}"
            return self.go(self.rest)
        self.buffer = ""
        return False

    def rest(self) -> bool:
        """Pass on everything as content."""
        self.until((), self.say)
        return False

    def arguments(self) -> bool:
        """Pass on the arguments of a call."""
        return self.take_object() and self.go(self.closing)

    def closing(self) -> bool:
        """Wait for the end of the call's object."""
        self.buffer = self.buffer.lstrip()
        if not self.buffer:
            return False
        self.buffer = self.buffer.removeprefix("}")
        return self.go(self.between)

    def between(self) -> bool:
        """Wait for another call, or content."""
        self.buffer = self.buffer.lstrip(" \t\r\n;,")
        if not self.buffer:
            return False
        self._tagged, self.fresh = False, True
        return self.go(self.call if self.buffer.startswith("{") else self.content)


def _tag(name: str) -> Tag:
    return Tag('{"name": ', f'{{"name": {json.dumps(name)}, "parameters": ', "}")


def build(context: ResponseParserContext) -> FormParser:
    """Build the parser."""
    return FormParser(reader=LlamaReader, think=None, tag=_tag)
