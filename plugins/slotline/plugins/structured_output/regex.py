"""Regular expressions: where an error lies, and how much text they ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
    """Return an engine's error about an expression, with the position in it if the engine or Python names one."""
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
    """Return the number of characters in the shortest text that an expression matches.

    The text is not built. The function scans the notation common to ECMAScript and Rust, for expressions that an engine
    has accepted.
    """
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


def classes(expression: str) -> Iterator[tuple[int, str]]:
    """Yield the classes of characters in an expression, in brackets or by property, with where each begins."""
    for match in _PART.finditer(expression):
        if match.lastgroup == "one" and match[0].startswith(("[", r"\p", r"\P")):
            yield match.start(), match[0]


def too_long(expression: str) -> str | None:
    """Return the reason why an expression needs more text than an engine can look ahead, or None."""
    if (length := shortest(expression)) > MOST_FORCED:
        return f"its shortest text has {length:,} characters, more than {MOST_FORCED:,}"
    return None


def misread(expression: str) -> str | None:
    """Return what an engine would leave out of an expression that takes it for a whole text's, or None.

    These are anchors with text outside of them, and assertions about the text before or after.
    """
    parts = list(_PART.finditer(expression))
    outer: list[tuple[bool, set[str]]] = []  # for each open group: True if text precedes it, and its anchors
    before, anchors = False, set[str]()
    ended = False  # by a `$`, so that nothing may follow in this branch
    for index, match in enumerate(parts):
        kind, text, where = match.lastgroup, match[0], f"at position {match.start()}"
        if kind == "open" and text == "(" and expression[match.end() : match.end() + 1] == "?":
            return f"{where}: what stands around is not looked at"
        if kind in ("one", "open") and ended:
            return f"{where}: '$' is not at the end"
        if kind == "one":
            before = True
        elif kind == "open":
            outer.append((before, anchors))
            anchors = set()
        elif kind == "nothing" and text in ("^", "$"):
            if text == "^" and before:
                return f"{where}: '^' is not at the beginning"
            anchors.add(text)
            ended |= text == "$"
        elif kind == "either":
            before, ended = bool(outer) and outer[-1][0], False
        elif kind == "close" and outer:
            follows = parts[index + 1].lastgroup if index + 1 < len(parts) else None
            if (anchors and follows == "times") or ("$" in anchors and _goes_on(parts, index + 1)):
                return f"{where}: an anchor is in the middle"
            anchors |= outer.pop()[1]
            before, ended = True, False
    return None


def _goes_on(parts: list[re.Match[str]], index: int) -> bool:
    """Return True if an expression has characters after one of its groups, in the same branch."""
    for match in parts[index:]:
        if match.lastgroup in ("one", "open"):
            return True
        if match.lastgroup in ("either", "close"):
            return False
    return False
