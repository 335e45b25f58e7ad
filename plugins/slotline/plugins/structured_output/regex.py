"""Where in a regular expression an error lies."""

from __future__ import annotations

import re

_CARET = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^.*\nerror: (.*)")


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
