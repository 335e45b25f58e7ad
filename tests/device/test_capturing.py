"""Capturing: what it leaves behind in the host process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

CAPTURES = """
import gc, json, sys
from slotline.builder.graph_capture import _no_collection

def capture(frozen, enabled, fails):
    gc.unfreeze()
    gc.enable() if enabled else gc.disable()
    if frozen:
        gc.collect()
        gc.freeze()
    found = {"before": gc.get_freeze_count()}
    try:
        with _no_collection():
            found["enabled"] = [gc.isenabled()]
            with _no_collection():  # a drafter's captures, inside
                pass
            found["enabled"].append(gc.isenabled())
            found["inside"] = gc.get_freeze_count()
            if fails:
                raise ValueError
    except ValueError:
        pass
    found["enabled"].append(gc.isenabled())
    return {**found, "after": gc.get_freeze_count()}

print(json.dumps([capture(*flags) for flags in json.loads(sys.argv[1])]))
"""
FLAGS = list(product([False, True], repeat=3))


@pytest.fixture(scope="module")
def captures() -> dict[tuple[bool, ...], Any]:
    """What a process finds around captures, by `FLAGS`; its heap is small, where this one takes seconds to collect."""
    command = [sys.executable, "-c", CAPTURES, json.dumps(FLAGS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(FLAGS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_the_host_process_froze_stays_frozen_and_nothing_else(
    frozen: bool, enabled: bool, fails: bool, captures: dict[tuple[bool, ...], Any]
) -> None:
    found = captures[frozen, enabled, fails]
    before, after = found["before"], found["after"]
    assert found["enabled"] == [False, False, enabled]  # inside, behind a capture inside, and afterwards
    assert found["inside"] > 0
    assert (after > 0) is frozen
    assert before - 100 < after <= before  # single objects may have gone since
