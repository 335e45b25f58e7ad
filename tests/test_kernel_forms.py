"""No number of tokens or requests has a kernel compiled anew: a request would wait for the compiler in the middle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = Path(__file__).parent / "kernel_forms.py"


@pytest.mark.parametrize(
    ("kind", "least"), [("attention", 10), ("latents", 4), ("hopper", 3), ("states", 10), ("logits", 8)]
)
def test_batches_of_all_sizes_share_their_kernels(kind: str, least: int) -> None:
    assert forms(kind) >= least


@pytest.mark.parametrize("limits", [("192", "24", "400"), ("1024", "70", "500"), ("16", "3", "100")])
def test_steps_launch_nothing_that_was_not_rehearsed(limits: tuple[str, ...]) -> None:
    assert forms("rehearsal", *limits) >= 8


def forms(*arguments: str) -> int:
    """How many kernels there are, none in several forms, and none that was not rehearsed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *several, count = done.stdout.splitlines()
    assert several == []
    (kernels,) = re.findall(r"^(\d+) kernels$", count)
    return int(kernels)
