"""Regular expressions: where an error lies, and how much text they ask for."""

from __future__ import annotations

import re

_CARET = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^.*\nerror: (.*)")
MOST_FORCED = 10_000
"""Characters that the shortest text of an expression may have: engines walk what must come next to its end in each
step, which takes milliseconds for so many and seconds for a million."""
_PART = re.compile(
    r"""(?P<nothing> \(\?[\w-]+\) | [\^$] | \\[bBAz] )
    | (?P<open> \( (?: \? (?: P?<\w+> | [\w-]*: ) )? )
    | (?P<close> \) )
    | (?P<either> \| )
    | (?P<times> (?: [*+?] | \{ (?P<least>\d+) (?: ,\d* )? \} ) \?? )
    | (?P<one> \[\^?\]? (?: \\. | \[:\^?\w+:\] | [^\]\\] )* \]
        | \\ (?: [pPxuU]\{[^}]*\} | x\w\w | u\w{4} | . ) | . )""",
    re.VERBOSE | re.DOTALL,
)


def located(expression: str, why: str) -> str:
    """An engine's complaint about an expression, with the position in it where the engine or Python names one."""
    if "at position" in why:
        return why
    if caret := _CARET.search(why):
        return f"at position {len(caret[1])}: {caret[2]}"
    try:
        re.compile(expression)
    except re.error as error:
        return f"at position {error.pos}: {error.msg}"
    return why


def shortest(expression: str) -> int:
    """Characters of the shortest text that an expression matches, counted without building it: a scan over the notation
    that ECMAScript and Rust share, for expressions that an engine has taken."""
    outer: list[tuple[int, int | None]] = []
    best: int | None = None  # the least of the branches before
    length = last = 0  # of this branch but for its last part, and that part's
    for match in _PART.finditer(expression):
        kind = match.lastgroup
        if kind == "one":
            length, last = length + last, 1
        elif kind == "open":
            outer.append((length + last, best))
            length, last, best = 0, 0, None
        elif kind in ("close", "either"):
            whole = length + last
            best = whole if best is None else min(best, whole)
            length, last = 0, 0
            if kind == "close" and outer:
                last = best
                length, best = outer.pop()
        elif kind == "times":
            last *= int(match["least"]) if match["least"] else match[0].startswith("+")
    whole = length + last
    return whole if best is None else min(best, whole)


def too_long(expression: str) -> str | None:
    """Why an expression asks for more text than an engine can look ahead, or None."""
    if (length := shortest(expression)) > MOST_FORCED:
        return f"its shortest text has {length:,} characters, more than {MOST_FORCED:,}"
    return None
