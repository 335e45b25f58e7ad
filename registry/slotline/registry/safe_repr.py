"""Show any value in an error message: short, in one line, and without a second error."""

from __future__ import annotations


def safe_repr(value: object, width: int = 60) -> str:
    """Return `repr(value)`, cut to `width` characters; the type's name where `repr` raises."""
    try:
        text = repr(value)
    except Exception as error:  # a stranger's code: anything may come out, RecursionError too
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text.replace("\n", " ")[:width]
