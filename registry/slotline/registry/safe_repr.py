"""Representation of any value for error messages: short, on one line, and without raising."""

from __future__ import annotations


def safe_repr(value: object, width: int = 60) -> str:
    """Return `repr(value)`, cut to `width` characters, or the type's name if `repr` raises."""
    try:
        text = repr(value)
    except Exception as error:  # foreign code may raise anything, RecursionError too
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text.replace("\n", " ")[:width]
