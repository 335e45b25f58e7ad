"""Time of whole commands from process start to end: wall and processor time, in turns with other installations.

    python benchmarks/start_time.py [--runs 9] [--command generate]
        [--against before=/path/to/venv/bin/python] [--one-core] [--json FILE]

Each round runs each command once with each installation, so that other work on the machine meets all of them alike. A
first run that is not timed leaves bytecode and compiled kernels in the caches. `--one-core` keeps each process on one
core: threads that wait for one another on a busy machine spin, and that would count as processor time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from attrs import frozen
from command_line import positive
from result_file import print_rows, write_result

SHORT = "--runs 1 --command help"
COMMANDS = {
    "help": ("--help",),
    "explain": ("explain",),
    "generate": ("generate", "def main(", "--max-tokens", "1"),
}
COLUMNS = ("command", "installation", "CPU s", "fewest CPU s", "wall s", "shortest wall s")


@frozen
class Seconds:
    """Time of one process: all its threads on processors, and on the wall."""

    cpu: float
    wall: float


def timed(python: str, command: tuple[str, ...], environment: Mapping[str, str], core: int | None) -> Seconds:
    """Run a command of an installation's slotline and wait for its end.

    Args:
        core: the core to stay on. None for all.

    Raises:
        SystemExit: if the command fails.
    """
    begun = time.perf_counter()
    process = subprocess.Popen(
        [python, Path(python).with_name("slotline"), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{python}: slotline {' '.join(command)} failed\n{said.decode(errors='replace')}")
    return Seconds(usage.ru_utime + usage.ru_stime, time.perf_counter() - begun)


def _installation(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if not name or not Path(python).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON with the Python of an installation")
    return name, python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=9, help="rounds")
    parser.add_argument("--command", action="append", choices=COMMANDS, help="repeatable; all of them if left out")
    parser.add_argument(
        "--against", action="append", type=_installation, default=[], metavar="NAME=PYTHON", help="repeatable"
    )
    parser.add_argument("--one-core", action="store_true", help="keep each process on one core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    options = parser.parse_args()
    installations = {**dict(options.against), "this": sys.executable}
    commands = options.command or list(COMMANDS)
    taken: dict[tuple[str, str], list[Seconds]] = {(c, name): [] for c in commands for name in installations}
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PYTHONPYCACHEPREFIX": folder, **os.environ, "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        cores = sorted(os.sched_getaffinity(0))
        for turn in range(1 + options.runs):
            for (command, name), seconds in taken.items():
                core = cores[turn % len(cores)] if options.one_core else None
                took = timed(installations[name], COMMANDS[command], environment, core)
                if turn:
                    seconds.append(took)
    rows = [
        [command, name, *(f"{value:.2f}" for value in (median(cpu), min(cpu), median(wall), min(wall)))]
        for (command, name), seconds in taken.items()
        for cpu, wall in [([s.cpu for s in seconds], [s.wall for s in seconds])]
    ]
    print_rows(COLUMNS, rows)
    if options.json:
        write_result(options.json, "start_time", COLUMNS, rows)


if __name__ == "__main__":
    main()
