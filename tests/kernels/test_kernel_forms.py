"""No number of tokens or requests has a kernel compiled anew: a request would wait for the compiler in the middle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest
from repository import SUPPORT

pytest.importorskip("triton")

PROGRAM = SUPPORT / "kernel_forms.py"


LEAST = {"attention": 10, "latents": 4, "states": 10, "logits": 7, "hopper": 3, "indexed": 5, "strides": 3, "trees": 4}
REHEARSALS = ("rehearsal,192,24,400", "rehearsal,1024,70,500", "rehearsal,16,3,100")


@pytest.fixture(scope="module")
def reports() -> Mapping[str, list[str]]:
    """By kind: the lines of its report. One process makes all, since to import what they need takes the longest."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # What fails to compile comes first: kernels that were compiled are not compiled again.
    command = [sys.executable, str(PROGRAM), "uncompiled", *LEAST, *REHEARSALS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.removeprefix("== ").split("== ")
    return {kind: lines for kind, *lines in map(str.splitlines, parts)}


@pytest.mark.parametrize("kind", LEAST)
def test_batches_of_all_sizes_share_their_kernels(reports: Mapping[str, list[str]], kind: str) -> None:
    assert forms(reports[kind]) >= LEAST[kind]


@pytest.mark.parametrize("limits", REHEARSALS)
def test_steps_launch_nothing_that_was_not_rehearsed(reports: Mapping[str, list[str]], limits: str) -> None:
    assert forms(reports[limits]) >= 8


def test_a_kernel_for_hopper_that_is_not_compiled_gives_way_and_one_warning_says_why(
    reports: Mapping[str, list[str]],
) -> None:
    launched, *warnings = reports["uncompiled"]
    assert launched == "launched: False, False"
    (warning,) = warnings
    assert re.match(r"Hopper's own kernels for single tokens are not used, .*: triton 3\.\d+.* not compile", warning)


def forms(report: list[str]) -> int:
    """How many kernels there are, none in several forms, and none that was not rehearsed."""
    *several, count = report
    assert several == []
    (kernels,) = re.findall(r"^(\d+) kernels$", count)
    return int(kernels)
