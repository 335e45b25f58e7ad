"""What the command lines of benchmarks share: counts with a least value, and the need for a GPU.

A script states in `SHORT` the arguments of a run that takes a second or two on a small model. The tests call every
script of this folder with them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from slotline.registry.errors import ConfigError


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type for whole numbers that are `least` or more."""

    def count(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is too small, use {least} or more")
        return number

    return count


positive = at_least(1)


def require_gpus(count: int = 1) -> None:
    """End the process with exit code 2 and a message where there are fewer CUDA GPUs than `count`."""
    import torch  # here: others are timed from their first import on

    found = torch.cuda.device_count()
    if found >= count:
        return
    error = ConfigError(
        f"this benchmark needs {count} CUDA GPU{'s' if count > 1 else ''}, and this machine has {found or 'none'}",
        fix="run it on a machine where `slotline doctor` lists them",
    )
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)
