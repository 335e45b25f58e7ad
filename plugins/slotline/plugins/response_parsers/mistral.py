"""Mistral: `[TOOL_CALLS]` and a list of calls in JSON, or a name and its arguments; reasoning in `[THINK]`."""

from __future__ import annotations

import json
import re
import secrets
import string

from slotline.plugins.response_parsers.json_calls import JsonCallsReader
from slotline.plugins.response_parsers.parser import FormParser, Tag
from slotline.plugins.response_parsers.reader import Reader
from slotline.registry.contracts import ResponseParserContext

_MARKER, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_THINK = ("[THINK]", "[/THINK]")
_NAMED = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]\s*([^\[\]{}\s]+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
_LETTERS = string.ascii_letters + string.digits


class MistralReader(JsonCallsReader):
    """Reader of content with calls behind a marker."""

    def content(self) -> bool:
        """Pass on content until calls."""
        return self.until((_MARKER,) if self.request.calls else (), self.say) is not None and self.go(self.form)

    def form(self) -> bool:
        """Decide which of the two forms the calls have."""
        self.buffer = self.buffer.lstrip()
        if self.buffer.startswith("["):
            self.buffer = self.buffer[1:]
            return self.go(self.head)
        return bool(self.buffer) and self.go(self.name)

    def name(self) -> bool:
        """Wait for a function's name."""
        if found := _NAMED.match(self.buffer):
            self.begin(found[1], found[2])
            self.buffer = self.buffer[found.end() :]
            return self.go(self.named_arguments)
        if self.final and self.buffer:
            self.say(_MARKER + self.buffer)
            self.buffer = ""
        return False

    def named_arguments(self) -> bool:
        """Pass on the arguments behind a name."""
        if not self.take_object((_MARKER,)):
            return False
        self.fresh = True
        return self.go(self.content)

    def after(self) -> bool:
        """Go on behind a list."""
        return self.go(self.content)

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. Its id has nine letters and digits, which the templates of this form insist on."""
        super().begin(name, call_id or "".join(secrets.choice(_LETTERS) for _ in range(9)))


def build(context: ResponseParserContext) -> FormParser:
    """Build the parser. The vocabulary says which of the two forms a required call has."""
    named = _ARGS in context.special_tokens or _ARGS in context.chat_template

    def tag(name: str) -> Tag:
        if named:
            return Tag(_MARKER, f"{_MARKER}{name}{_ARGS}", "")
        return Tag(_MARKER, f'{_MARKER}[{{"name": {json.dumps(name)}, "arguments": ', "}]")

    def reader(request: object) -> Reader:
        return MistralReader(request, _THINK)  # type: ignore[arg-type]

    return FormParser(reader=reader, think=_THINK, tag=tag)
