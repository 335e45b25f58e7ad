"""Facts that belong to a measurement: machine, software, commit and date."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slotline.registry.processor import processor

PACKAGES = ("torch", "triton", "transformers", "numba")


def machine_name() -> str:
    """Return the GPUs if there are any, else the processor and the number of threads that torch uses."""
    import torch  # here: others are timed from their first import on

    count = torch.cuda.device_count()
    if count:
        return f"{count} x {torch.cuda.get_device_name()}"
    return f"{processor()}, {torch.get_num_threads()} threads"


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


def today() -> str:
    """Return the date in UTC, as ISO 8601 has it."""
    return datetime.now(UTC).date().isoformat()
