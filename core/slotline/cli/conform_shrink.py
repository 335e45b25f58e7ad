"""Failing batches of an attention backend made small, each in a process of its own, since it may crash."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slotline.testing.report import Report

MOST = 5
"""So many checks are made small, the first failing run of each."""
_SECONDS = 60
_GRACE_S = 60


def shrink_failures(report: Report, name: str, arguments: argparse.Namespace) -> None:
    """Print for each failing check its smallest batch, with a command of one line and a pytest file.

    Args:
        report: of the suite.
        name: of the plugin, as the suite took it.
        arguments: those of the command, with the folder for the files.
    """
    from slotline.testing.pytest_options import read_settings

    first = {record.id: record for record in reversed(report.records) if record.bad}
    for record in list(reversed(first.values()))[:MOST]:
        file = Path(arguments.shrink, f"test_{re.sub(r'[^a-z0-9]+', '_', record.id.lower())}.py")
        words = [sys.executable, "-P", "-m", "slotline.testing.shrinking", name, record.key, f"--file={file}"]
        words += [f"--seed={arguments.seed}", f"--seconds={_SECONDS}"]
        words += [f"--device={arguments.device}"] if arguments.device else []
        words += ["--exhaustive"] if arguments.exhaustive else []
        words += [f"--settings={json.dumps(read_settings(arguments.set))}"] if arguments.set else []
        print("\n" + _output(words, record.key))


def _output(words: list[str], key: str) -> str:
    """Return what the process printed, or a line that says why it printed nothing of use."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS + _GRACE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{key}: not made small within {_SECONDS + _GRACE_S} s"
    if done.returncode == 0:
        return done.stdout.strip()
    last = done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"]
    said = [line for line in last if line.startswith("slotline.")] or last[-1:]
    return f"{key}: not made small: {said[0].rpartition('Error: ')[2]}"
