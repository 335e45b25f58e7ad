"""Rules that repeat themselves and nothing else. They match no text, and XGrammar 0.2.9 ends the process over them."""

from __future__ import annotations

import re

_RULE = re.compile(r"^(?P<name>\w+) ::= \(\((?P<body>\w+)(?P<times>\{\d+, -?\d+\})?\)\)$", re.MULTILINE)


def endless(printed: str) -> str | None:
    """Return a rule of a printed grammar that is only a repetition of itself, maybe through others. None if none is."""
    found = {rule["name"]: (rule["body"], bool(rule["times"])) for rule in _RULE.finditer(printed)}
    for first in found:
        name, repeats, passed = first, False, set[str]()
        while name in found and name not in passed:
            passed.add(name)
            name, times = found[name]
            repeats |= times
        if name == first and repeats:
            return first
    return None
