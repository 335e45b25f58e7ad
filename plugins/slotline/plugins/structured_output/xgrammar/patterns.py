"""Expressions in JSON schemas as XGrammar compiles them: which keep a text JSON, and which mean what they say.

XGrammar (0.2.8) makes an automaton of an expression in plain ASCII, and leaves out of it the characters that JSON
writes as escapes. Where there is other than ASCII in it, or nothing would be left, it falls back to a grammar that has
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from json import dumps
from typing import Any

import xgrammar

from slotline.plugins.structured_output.json_schema import subschemas
from slotline.plugins.structured_output.regex import misread

_UNSAFE_FORMATS = frozenset({"json-pointer", "relative-json-pointer"})
"""Formats whose grammars in XGrammar hold quotation marks, backslashes and control characters as they are."""
_NOT_ASCII = re.compile(r"\\(?P<escaped>.)|(?P<plain>[^\x20-\x7e])", re.DOTALL)


def in_ascii(root: Any) -> None:
    """Write the expressions of a schema in ASCII, in place, which changes nothing but how XGrammar compiles them."""
    for _, part in subschemas(root):
        if not isinstance(part, dict):
            continue
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = _ascii(pattern)
        if isinstance(table := part.get("patternProperties"), Mapping):
            part["patternProperties"] = {_ascii(pattern): value for pattern, value in table.items()}


def broken_by(part: Any) -> str | None:
    """Return what of a schema, written in ASCII, XGrammar would make texts of that are no JSON or do not match."""
    if not isinstance(part, Mapping):
        return None
    if (name := part.get("format")) in _UNSAFE_FORMATS:
        return f"format {name!r}: it would leave out the escapes of JSON"
    table = part.get("patternProperties")
    for pattern in (part.get("pattern"), *(table if isinstance(table, Mapping) else ())):
        if isinstance(pattern, str) and (why := misread(pattern) or _unescaped(pattern)):
            return f"pattern {pattern!r:.60}: {why}"
    return None


@lru_cache(maxsize=4096)
def _unescaped(pattern: str) -> str | None:
    """Return the reason why the text of an expression would not be JSON, or None. Invalid expressions are ignored."""
    try:
        grammar = xgrammar.Grammar.from_json_schema(dumps({"type": "string", "pattern": pattern}))
    except RuntimeError:
        return None
    if re.search(r"^\w+ ::= Regex\(", str(grammar), re.MULTILINE):
        return None
    return "it needs characters that JSON writes as escapes"


def _ascii(pattern: str) -> str:
    def written(match: re.Match[str]) -> str:
        character = match["escaped"] or match["plain"]
        if " " <= character <= "~":
            return match[0]
        code = ord(character)
        return f"\\u{code:04x}" if code < 0x10000 else f"\\u{{{code:x}}}"

    return _NOT_ASCII.sub(written, pattern)
