"""Tables: drawn by rich on a terminal, aligned columns elsewhere, so that output in a pipe is stable."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print a table on standard output.

    Args:
        headers: one for each column.
        rows: the cells.
        right: numbers of the columns that are aligned to the right.
    """
    if sys.stdout.isatty():
        _draw(headers, rows, right)
    else:
        print(plain_table(headers, rows, right=right))


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """The table as aligned text."""
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(_line(line, widths, right) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def _draw(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
