"""A public name is imported lightly: what was compiled is kept, and no collection looks at all of it."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from slotline.registry.lean_start import import_module, lean_start

PROGRAM = """
import gc, sys
looked = []
gc.callbacks.append(lambda when, _: looked.append(len(gc.get_objects(generation=0))) if when == "start" else None)
import slotline.core
del looked[:]
slotline.core.LLM
print(max(looked, default=0) < 50_000, gc.get_freeze_count(), gc.get_threshold()[0] < 10_000)
"""


@pytest.mark.slow
def test_the_first_public_name_collects_nothing_and_keeps_compiled_code(tmp_path: Path) -> None:
    environment = {"SLOTLINE_CACHE": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True 0 True\n"
    assert len(list(tmp_path.glob("*.code"))) == 1


def test_a_module_that_is_there_is_not_imported_again() -> None:
    assert import_module("json") is sys.modules["json"]


def test_what_a_process_has_frozen_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    gc.freeze()
    try:
        import_module("colorsys")
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def test_inside_of_a_start_garbage_is_collected_rarely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    before = gc.get_threshold()
    with lean_start():
        assert gc.get_threshold()[0] > 10_000
    assert gc.get_threshold() == before
