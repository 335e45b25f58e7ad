"""Tables: drawn by rich on a terminal, aligned columns elsewhere, so that output in a pipe is stable."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_LEAST = 16
"""Columns that the widest cells may be squeezed to. On a narrower terminal each row becomes a few lines."""


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 0
) -> None:
    """Print a table on standard output.

    Args:
        headers: one for each column.
        rows: the cells.
        right: numbers of the columns that are aligned to the right.
        indent: spaces before each line.
    """
    if sys.stdout.isatty():
        _draw(headers, rows, right, indent)
    else:
        lines = plain_table(headers, rows, right=right).splitlines()
        print("\n".join(f"{' ' * indent}{line}" for line in lines))


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return the table as aligned text."""
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(_line(line, widths, right) for line in lines)


def without_empty_columns(
    headers: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Leave out those of the `optional` columns that have no text in any row."""
    kept = [n for n, header in enumerate(headers) if header not in optional or any(row[n] for row in rows)]
    return [headers[n] for n in kept], [[row[n] for n in kept] for row in rows]


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def _draw(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], indent: int) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console()
    widths = [max(len(line[column]) for line in (headers, *rows)) for column in range(len(headers))]
    if indent + sum(min(width, _LEAST) for width in widths) + 2 * (len(widths) - 1) > console.width:
        for row in rows:
            console.print(Padding(Text(_stacked(headers, row)), (0, 0, 0, indent)))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(Padding(table, (0, 0, 0, indent)))


def _stacked(headers: Sequence[str], row: Sequence[str]) -> str:
    """Return a row as lines of its own: the first cells, then each further one with its header."""
    first = "  ".join(row[:2])
    return "\n".join([first, *(f"  {h}: {cell}" for h, cell in zip(headers[2:], row[2:], strict=True) if cell)])
