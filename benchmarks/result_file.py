"""Result files: the figures of a benchmark with machine, software, date, commit and command.

docs/generate.py makes the tables of docs/performance.md from the files in benchmarks/results.
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "numba")


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
        "machine": machine(),
        "software": software(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "commands": [shlex.join(["python", f"benchmarks/{benchmark}.py", *without_json(sys.argv[1:])])],
        "source": "written by the benchmark",
        "note": note,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def without_json(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without `--json FILE`."""
    given = list(arguments)
    if "--json" in given:
        first = given.index("--json")
        del given[first : first + 2]
    return given


def machine() -> str:
    """Return the GPUs if there are any, else the processor and the number of threads that torch uses."""
    import torch  # here: others are timed from their first import on

    count = torch.cuda.device_count()
    if count:
        return f"{count} x {torch.cuda.get_device_name()}"
    return f"{processor()}, {torch.get_num_threads()} threads"


def processor() -> str:
    """Return the processor's name, or its architecture if the system does not tell the name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def software() -> str:
    """Return the versions of Python and of the packages that decide the speed."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()}"])


def commit() -> str | None:
    """Return the commit of the sources, with "-dirty" if they were changed, or None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
