"""Estimate of XGrammar's time to compile a grammar, made beforehand because compilation cannot be interrupted.

Compiling creates a mask of the vocabulary for each place in a grammar. At most places only one character may come next,
and few tokens are tested. If many optional parts may follow, all tokens are tested against all of them, and the time
grows with the square of their number. The constants are those of XGrammar 0.2.8 on one thread.
"""

from __future__ import annotations

import re
from itertools import groupby

import xgrammar
from attrs import define, field

_PLACE = 60e-6
_PLACE_AND_TOKEN = 0.7e-9
_WALK = 1e-9
"""Seconds of a place, of a place by the vocabulary's size, and of a token walked through one part at one place."""
_LOOP = 8
"""Walks of a part that may be repeated, by those of a rule that may be left out."""
_PART = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*") | (?P<class>\[(?:\\.|[^\]\\])*\]) | (?P<name>\w+)'
    r"| (?P<times>\*|\{\d+,[ ]-?\d+\}) | (?P<mark>[()|])",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\(?:x\w\w|u\w{4}|U\w{8}|.)|.", re.DOTALL)


_EXPRESSION = re.compile(r'Regex\("((?:\\.|[^"\\])*)"', re.DOTALL)


@define
class _Rule:
    """Characters and classes of a rule, and its alternatives.

    Attributes:
        alternatives: the parts of each: None for one that takes text, "" for one that repeats from zero on, else the
            name of a rule.
    """

    places: int = 0
    alternatives: list[list[str | None]] = field(factory=list)
    is_optional: bool = False


def seconds(printed: str, vocab_size: int) -> float:
    """Return about how long a printed grammar takes to compile."""
    rules = _rules(printed)

    def may_be_left_out(part: str | None) -> bool:
        return part == "" or (part in rules and rules[part].is_optional)

    for _ in range(2):  # also rules of optional rules
        for rule in rules.values():
            rule.is_optional |= any(all(map(may_be_left_out, parts)) for parts in rule.alternatives)
    walks = sum(rule.is_optional for rule in rules.values()) ** 2
    for rule in rules.values():
        for parts in rule.alternatives:
            runs = (sum(1 for _ in run) for optional, run in groupby(parts, may_be_left_out) if optional)
            walks += _LOOP * sum(run**2 for run in runs)
    places = sum(rule.places for rule in rules.values())
    total = places * (_PLACE + _PLACE_AND_TOKEN * vocab_size) + walks * vocab_size * _WALK
    for expression in set(_EXPRESSION.findall(printed)):
        text = re.sub(r"\\(.)", r"\1", expression, flags=re.DOTALL)
        total += seconds(str(xgrammar.Grammar.from_regex(text)), vocab_size)
    return total


def _rules(printed: str) -> dict[str, _Rule]:
    """Return the rules of a printed grammar, which has one on each line."""
    rules: dict[str, _Rule] = {}
    for line in printed.splitlines():
        name, _, body = line.partition(" ::= ")
        rule, parts = rules.setdefault(name, _Rule()), list[str | None]()
        for match in _PART.finditer(body):
            kind, text = match.lastgroup, match[0]
            if kind == "text":
                characters = sum(1 for _ in _CHARACTER.finditer(text, 1, len(text) - 1))
                rule.places += characters
                rule.is_optional |= not characters
                parts += [None] if characters else []
            elif kind == "class":
                rule.places += 1
                parts.append(None)
            elif kind == "name":
                parts.append(text)
            elif kind == "times" and parts and text.startswith(("*", "{0,")):
                parts[-1] = ""
            elif kind == "mark" and parts:
                rule.alternatives.append(parts)
                parts = []
    return rules
