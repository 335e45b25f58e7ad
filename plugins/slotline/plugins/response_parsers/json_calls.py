"""Calls as JSON objects with a name and arguments: alone, one after another, or in a list."""

from __future__ import annotations

from typing import Any

from slotline.plugins.response_parsers.reader import HEAD, Reader, unescaped
from slotline.registry.contracts import ResponseRequest


def list_schema(request: ResponseRequest) -> dict[str, Any]:
    """Return the schema of a list of calls of the functions that may be called."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [function["name"]]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in request.callable_functions
    ]
    one = request.tool_choice == "named" or not request.parallel
    return {"type": "array", "minItems": 1, **({"maxItems": 1} if one else {}), "items": {"anyOf": calls}}


class JsonCallsReader(Reader):
    """Reader of a list of calls that is the whole content."""

    def content(self) -> bool:
        """Wait for the list."""
        text = self.buffer.lstrip()
        if text.startswith("["):
            self.buffer = text[1:]
            return self.go(self.head)
        if text or self.final:
            return self.go(super().content)
        return False

    def head(self) -> bool:
        """Wait for a call's name."""
        if found := HEAD.match(self.buffer):
            self.begin(unescaped(found[1]))
            self.buffer = self.buffer[found.end() :]
            return self.go(self.arguments)
        if self.final and self.buffer:
            text, self.buffer = self.buffer, ""
            if not self.whole_call(text) and not self.whole_call(f"[{text}"):
                self.say(text if self.calls else f"[{text}")
        return False

    def arguments(self) -> bool:
        """Pass on the arguments of a call."""
        return self.take_object() and self.go(self.rest_of_call)

    def rest_of_call(self) -> bool:
        """Skip the rest of a call's object, and what is between two calls."""
        at = self.buffer.find("}")
        if at < 0:
            self.buffer = ""
            return False
        self.buffer = self.buffer[at + 1 :]
        return self.go(self.between)

    def between(self) -> bool:
        """Wait for another call or the end of the list."""
        self.buffer = self.buffer.lstrip(" \t\r\n,")
        if self.buffer.startswith("]"):
            self.buffer, self.fresh = self.buffer[1:], True
            return self.go(self.after)
        return bool(self.buffer) and self.go(self.head)

    def after(self) -> bool:
        """Go on behind the list."""
        self.until((), self.say)
        return False
