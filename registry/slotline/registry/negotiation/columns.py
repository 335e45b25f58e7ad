"""Plain text in columns, wrapped to a width. The output does not depend on terminal, colour or time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap

LABEL = 14
"""Columns of the label at the left edge."""


def row(label: str, text: str, width: int, *, indent: int = 0) -> list[str]:
    """Return the lines of one labelled entry. Continuation lines are indented to the text."""
    head = " " * indent + label
    head = head.ljust(LABEL) if len(head) < LABEL else head + "  "
    return hang(head, text, width)


def hang(head: str, text: str, width: int) -> list[str]:
    """Wrap `text` after `head`, without breaking words."""
    lines = wrap(text, max(width - len(head), 20), break_long_words=False, break_on_hyphens=False) or [""]
    return [
        f"{lead}{line}".rstrip() for lead, line in zip([head, *[" " * len(head)] * len(lines)], lines, strict=False)
    ]


def rows(label: str, texts: Iterable[str], width: int, *, indent: int = 0) -> list[str]:
    """Return the lines of several entries under one label, which is printed at the first."""
    found: list[str] = []
    for number, text in enumerate(texts):
        found += row(label if number == 0 else "", text, width, indent=indent)
    return found


def table(cells: Sequence[Sequence[str]], indent: str) -> list[str]:
    """Return left-aligned columns, two spaces apart."""
    if not cells:
        return []
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    padded = ("  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)) for line in cells)
    return [f"{indent}{line}".rstrip() for line in padded]


def place(origin: str, key: str) -> str:
    """Return an origin without the key at its end, if the key is printed next to it anyway."""
    return origin.removesuffix(key).strip() or origin
