"""Result files: the figures of a benchmark with machine, software, date, commit and command.

docs/generate.py makes the tables of docs/performance.md from the files in benchmarks/results.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from slotline.cli.result_facts import commit, machine_name, software, today


def write_result(
    path: Path, benchmark: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, note: str = ""
) -> None:
    """Write a result file.

    Args:
        path: the file. Folders are made.
        benchmark: name of the script without its ending.
        columns: headings of the table. Units belong here.
        rows: cells as text, as many in each row as there are columns.
        note: conditions that the command does not show, in one or two sentences.

    Raises:
        ValueError: if a row has another number of cells than there are columns.
    """
    if any(len(row) != len(columns) for row in rows):
        raise ValueError(f"each row of {benchmark} needs {len(columns)} cells")
    result = {
        "benchmark": benchmark,
        "machine": machine_name(),
        "software": software(),
        "date": today(),
        "commit": commit(),
        "commands": [shlex.join(["python", f"benchmarks/{benchmark}.py", *without_json(sys.argv[1:])])],
        "source": "written by the benchmark",
        "note": note,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells below their columns' headings, then the same as one line of JSON."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print(" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))


def without_json(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without `--json FILE`."""
    given = list(arguments)
    if "--json" in given:
        first = given.index("--json")
        del given[first : first + 2]
    return given
