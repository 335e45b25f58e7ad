"""Expressions in JSON schemas as llguidance escapes them.

llguidance (1.9.1) adds quotation marks and backslashes to a class of characters that has all control characters: for
`[^"]` it allows an escaped quotation mark. A class without U+0000 is handled correctly.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from slotline.plugins.structured_output.json_schema import subschemas
from slotline.plugins.structured_output.regex import classes

_UNKNOWN = re.compile(r"\\[pP]|\[:|&&|--|~~|.\[", re.DOTALL)
"""Notation that Python reads differently."""
_WIDE = re.compile(r"\[\^|\\P|\\p\{?(C|Any|Other|Ascii|ASCII)|ascii|cntrl|\^")
"""What in it may hold control characters."""


def keep_quotes_out(root: Any) -> None:
    """Take U+0000 out of the classes of a schema's expressions that are mistaken, in place."""
    for _, part in subschemas(root):
        if isinstance(part, dict) and isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = _kept(pattern)


def mistaken_name(part: Any) -> str | None:
    """Return an expression for names in `patternProperties` that has a mistaken class, or None."""
    table = part.get("patternProperties") if isinstance(part, Mapping) else None
    return (
        next((pattern for pattern in table if _kept(pattern) != pattern), None) if isinstance(table, Mapping) else None
    )


def _kept(pattern: str) -> str:
    found, end = [], 0
    for begin, text in classes(pattern):
        if _is_mistaken(text):
            found += [pattern[end:begin], f"[{text}--\\x00]"]
            end = begin + len(text)
    return "".join([*found, pattern[end:]])


def _is_mistaken(text: str) -> bool:
    """Return whether a class has U+0000 and lacks quotation marks or backslashes, or may so."""
    if _UNKNOWN.search(text, 1 if text.startswith("[") else 0):
        return _WIDE.search(text) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            taken = [re.fullmatch(text, character) is not None for character in '\0"\\']
        except re.error:
            return True
    return taken[0] and not (taken[1] and taken[2])
