"""The table of docs/model-families.md on ranks, by dividing every tiny family.

`python tests/support/tensor_table.py` writes the page.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import tensor_sweep
import tiny_models
from family_table import FAMILIES, PAGE

SIZES = (2, 4)
COLUMNS = ("family", *(f"on {size} ranks" for size in SIZES))
START, END = "<!-- tensor -->\n", "<!-- end tensor -->"


def row(name: str, path: Path, sizes: tuple[int, ...] = SIZES) -> str:
    """Return the row of a family."""
    whole = tensor_sweep.say(tensor_sweep.load(path))
    return f"| {name} | " + " | ".join(cell(path, size, whole) for size in sizes) + " |"


def cell(path: Path, size: int, whole: tensor_sweep.Said) -> str:
    """Return whether the parts of a checkpoint are equal, and the parameters of a rank."""
    word, reason = tensor_sweep.verdict(path, size, whole)
    reason = reason.partition(": ")[2] if word == "REFUSED" else reason.replace("model.layers", "layers")
    return f"{word.lower()}, {reason}"


def shown() -> dict[str, str]:
    """Return the rows of the page by family."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(START) : text.index(END)]
    found = {match[1]: match[0] for match in re.finditer(r"^\| ([a-z][a-z0-9_]*) \|.*$", table, re.M)}
    return {name: row for name, row in found.items() if name != COLUMNS[0]}


def write(build: Callable[[str, Path], Path]) -> None:
    """Write the page's table."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(name, build(name, Path(folder) / name)) for name in FAMILIES]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows]
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text[: text.index(START) + len(START)], text[text.index(END) :]
    PAGE.write_text(head + "\n".join(lines) + "\n" + tail, encoding="utf-8")


if __name__ == "__main__":
    write(tiny_models.build)
