"""Limit on nesting in configuration texts and values, so that a hostile one is reported as a fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slotline.registry.config.tree import KeyPath

MAX_NESTING = 32
"""Levels of brackets, and parts of a dotted key."""

TOO_DEEP = f"tables or lists nest deeper than {MAX_NESTING} levels"
"""The fault."""

_TOKEN = re.compile(
    r'(?P<part>"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'|[\w+:-]+)"
    r"|(?P<open>[\[{])|(?P<close>[\]}])|(?P<dot>[ \t]*\.[ \t]*)|(?P<comment>\#[^\n]*)|(?P<stray>[\"'])",
    re.DOTALL,
)


def too_deep_at(text: str) -> int | None:
    """Return the offset at which a TOML text nests deeper than `MAX_NESTING`, or None.

    The text may be invalid. The scan ends at an unfinished string, which the parser reports.
    """
    depth = dots = end = 0
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "stray":
            return None
        dots = dots if token.start() == end else 0
        end = token.end()
        if kind == "dot":
            dots += 1
        elif kind != "part":
            dots = 0
            depth = max(0, depth + (kind == "open") - (kind == "close"))
        if max(depth, dots) > MAX_NESTING:
            return token.start()
    return None


def too_deep_key(values: Any) -> KeyPath | None:
    """Return the key path, cut off at the limit, below which values nest deeper than `MAX_NESTING`, or None.

    A value that contains itself is too deep.
    """
    level: dict[int, tuple[KeyPath, Any]] = {id(values): ((), values)}
    for _ in range(MAX_NESTING + 1):
        below = (item for path, value in level.values() for item in _children(path, value))
        level = {id(value): (path, value) for path, value in below}
        if not level:
            return None
    return next(iter(level.values()))[0][:MAX_NESTING]


def _children(path: KeyPath, value: Any) -> list[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping):
        return [((*path, str(key)), inner) for key, inner in value.items()]
    return [(path, inner) for inner in value] if isinstance(value, (list, tuple)) else []
