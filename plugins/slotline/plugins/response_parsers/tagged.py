"""Calls whose arguments stand between tags of their own, one after another (GLM, MiniMax, Qwen Coder)."""

from __future__ import annotations

import json
import re
from typing import Any

from attrs import frozen

from slotline.plugins.response_parsers.parser import THINK
from slotline.plugins.response_parsers.reader import Reader
from slotline.registry.contracts import ResponseRequest


@frozen(kw_only=True)
class Tags:
    """Tags of a form.

    Attributes:
        opening, closing: around a call, or around all calls.
        head: what a call begins with, behind the opening. Its group is the name.
        argument: what an argument begins with. Its group is the name.
        value_end: what it ends with.
        call_end: what a call ends with.
    """

    opening: str
    closing: str
    head: re.Pattern[str]
    argument: re.Pattern[str]
    value_end: str
    call_end: str


class TaggedReader(Reader):
    """Reader of content with tagged calls. Arguments become JSON one by one, typed by the function's schema."""

    def __init__(self, request: ResponseRequest, tags: Tags) -> None:
        super().__init__(request, THINK)
        self._tags = tags
        self._name = ""
        self._key = ""
        self._given = 0

    def content(self) -> bool:
        """Pass on content until a call."""
        opening = (self._tags.opening,) if self.request.calls else ()
        return self.until(opening, self.say) is not None and self.go(self.head)

    def head(self) -> bool:
        """Wait for a call's name, or the end of all calls."""
        self.buffer = self.buffer.lstrip()
        if self.buffer.startswith(self._tags.closing):
            self.buffer, self.fresh = self.buffer[len(self._tags.closing) :], True
            return self.go(self.content)
        if found := self._tags.head.match(self.buffer):
            self._name, self._given = found[1].strip(), 0
            self.begin(self._name)
            self.buffer = self.buffer[found.end() :]
            return self.go(self.arguments)
        end = self.buffer.find(self._tags.closing)
        if end >= 0 or self.final:
            end = len(self.buffer) if end < 0 else end + len(self._tags.closing)
            text, self.buffer = self.buffer[:end], self.buffer[end:]
            if text:
                self.say(self._tags.opening + text)
            self.fresh = False
            return self.go(self.content) if self.buffer else self._back()
        return False

    def arguments(self) -> bool:
        """Wait for an argument or the call's end. What is neither is dropped."""
        self.buffer = self.buffer.lstrip()
        if found := self._tags.argument.match(self.buffer):
            self._key = found[1].strip()
            self.argue(f"{', ' if self._given else '{'}{json.dumps(self._key, ensure_ascii=False)}: ")
            self._given += 1
            self.buffer = self.buffer[found.end() :]
            return self.go(self.value)
        if self.buffer.startswith(self._tags.call_end) or (self.final and not self.buffer and not self._given):
            self.argue("}" if self._given else "{}")
            self._given = 1
            self.buffer = self.buffer[len(self._tags.call_end) :]
            self.fresh = True
            same = self._tags.call_end == self._tags.closing
            return bool(self.buffer or not self.final) and self.go(self.content if same else self.head)
        at = self.buffer.find("<", 1)
        if at > 0 and not self.buffer.startswith("<"):
            self.buffer = self.buffer[at:]
            return True
        return False

    def value(self) -> bool:
        """Wait for the end of an argument."""
        text, end, rest = self.buffer.partition(self._tags.value_end)
        if end:
            self.argue(self._json(text))
            self.buffer = rest
            return self.go(self.arguments)
        if self.final and text:
            self.argue(json.dumps(text, ensure_ascii=False)[:-1])
            self.buffer = ""
        return False

    def _back(self) -> bool:
        self.state = self.content
        return False

    def _json(self, text: str) -> str:
        """Return the value of the current argument as JSON: as it is if it is JSON and no text is wanted."""
        if text.startswith("\n") and text.endswith("\n") and len(text) > 1:
            text = text[1:-1]
        kind = _properties(self.request, self._name).get(self._key, {})
        kind = kind.get("type") if isinstance(kind, dict) else None
        if kind != "string":
            try:
                return json.dumps(json.loads(text), ensure_ascii=False)
            except (ValueError, RecursionError):
                if text.strip() in ("True", "False", "None"):
                    return {"True": "true", "False": "false", "None": "null"}[text.strip()]
        return json.dumps(text, ensure_ascii=False)


def _properties(request: ResponseRequest, name: str) -> dict[str, Any]:
    for tool in request.tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            found = (function.get("parameters") or {}).get("properties")
            return found if isinstance(found, dict) else {}
    return {}
