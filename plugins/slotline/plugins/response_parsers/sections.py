"""Calls in sections: a marker, the function's name, a separator, the arguments in JSON, a marker (DeepSeek, Kimi)."""

from __future__ import annotations

import re

from attrs import frozen

from slotline.plugins.response_parsers.parser import THINK
from slotline.plugins.response_parsers.reader import Reader
from slotline.registry.contracts import ResponseRequest

_FENCED = re.compile(r"\s*([^\n`]+)\n```(?:json)?\s*(?=\{)")


@frozen(kw_only=True)
class SectionMarkers:
    """Markers of a form.

    Attributes:
        opening, closing: around all calls.
        begin, separator, end: of a call.
        whole_heads: whether what stands before the separator is an id too, as in ``functions.name:0``.
    """

    opening: str
    closing: str
    begin: str
    separator: str
    end: str
    whole_heads: bool = False

    def name_of(self, head: str) -> tuple[str, str | None]:
        """Return a function's name, and the id of its call if the model wrote one."""
        if not self.whole_heads:
            return head, None
        return head.removeprefix("functions.").rpartition(":")[0] or head, head


class SectionReader(Reader):
    """Reader of content with sections of calls."""

    def __init__(self, request: ResponseRequest, markers: SectionMarkers) -> None:
        super().__init__(request, THINK)
        self._markers = markers

    def content(self) -> bool:
        """Pass on content until a section or a call."""
        m = self._markers
        found = self.until((m.opening, m.begin) if self.request.calls else (), self.say)
        if found is None:
            return False
        return self.go(self.head if found == m.begin else self.section)

    def section(self) -> bool:
        """Wait for a call or the end of the section. What stands between calls is dropped."""
        found = self.until((self._markers.begin, self._markers.closing), lambda _: None)
        if found is None:
            return False
        return self.go(self.head if found == self._markers.begin else self.content)

    def head(self) -> bool:
        """Wait for the separator, and for the name behind it in the older form of DeepSeek."""
        head, separator, rest = self.buffer.partition(self._markers.separator)
        if separator and head.strip() == "function":
            if found := _FENCED.match(rest):
                self.begin(found[1].strip())
                self.buffer = rest[found.end() :]
                return self.go(self.arguments_begin)
        elif separator:
            self.begin(*self._markers.name_of(head.strip()))
            self.buffer = rest
            return self.go(self.arguments_begin)
        if self.final and self.buffer:
            self.say(self._markers.begin + self.buffer)
            self.buffer = ""
        return False

    def arguments_begin(self) -> bool:
        """Decide whether the arguments are an object or something else, which is passed on."""
        self.buffer = self.buffer.lstrip()
        if not self.buffer:
            return False
        return self.go(self.arguments if self.buffer.startswith("{") else self.other_arguments)

    def arguments(self) -> bool:
        """Pass on an object."""
        end = self._markers.end
        return self.take_object((end,)) and self.go(self.drop_until(end, self.section))

    def other_arguments(self) -> bool:
        """Pass on what is no object."""
        return self.until((self._markers.end,), self.argue) is not None and self.go(self.section)
