"""What the tests of the conformance suite's machinery share: a tiny plugin with checks of its own, and runs of it.

The checks stand in place of the suite's, and everything runs in processes of its own, so that no other test sees them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from slotline.registry.descriptor import Kind
from slotline.testing import Check, Level, Run

TINY = '''
"""A logits processor in name only, and checks that end in every way."""

import importlib
import os
import time

from attrs import frozen

from slotline.registry.contracts.logits_processor import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.testing import Failed, Family, Level, NotApplicable, check

suite = importlib.import_module("slotline.testing.check")  # the package has a function of that name
suite.CHECK_MODULES = {**suite.CHECK_MODULES, Kind.LOGITS_PROCESSOR: ()}
LOST = []  # what a real GPU does after a fault: every call fails until the process ends
importlib.import_module("slotline.testing.runner")._synchronize = lambda subject: LOST and LOST[0]()
# torch says what the machine is, and takes longer to import than all else here together.
importlib.import_module("slotline.testing.subject")._device = lambda *_: DeviceInfo(type="cpu")


@frozen
class Options:
    broken: bool = False
    dies: bool = False
    loses: bool = False
    hangs: bool = False


descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="tiny",
    capabilities=LogitsProcessorCapabilities(),
    factory="tiny:Tiny",
    options=Options,
)


class Tiny:
    """Never built."""


def fake(name, level, **rest):
    return check(Kind.LOGITS_PROCESSOR, f"logits_processor.fake.{name}", level, **rest)


@fake("passes", Level.CONTRACT, cases=lambda subject: ({"n": n, "shape": (n, 2)} for n in (1, 2)))
def passes(run):
    "It passes, with a measurement."
    run.measure(error=0.5, allowed=1.0, baseline=0.25)


@fake("broken", Level.NUMERICS, profile="decode")
def broken(run):
    "It fails if the plugin is broken."
    if run.subject.options.broken:
        raise Failed("request 3, position 7: expected 1, came 2")


@fake("partly", Level.NUMERICS, cases=lambda subject: ({"n": n} for n in (1, 2)))
def partly(run):
    "Its second case fails if the plugin is broken."
    assert not (run.subject.options.broken and run["n"] == 2), "the second is wrong"


@fake("partly.more", Level.NUMERICS)
def partly_more(run):
    "Its id lies below another's."


@fake("undeclared", Level.NUMERICS, needs={"argmax_invariant": True})
def undeclared(run):
    "It never runs."


@fake("elsewhere", Level.NUMERICS)
def elsewhere(run):
    "It does not run here."
    raise NotApplicable("no such machine")


@fake("dies", Level.HOSTILE)
def dies(run):
    "It takes its process down if the plugin does."
    if run.subject.options.dies:
        os.abort()
    if run.subject.options.hangs:
        time.sleep(600)
    if run.subject.options.loses:
        LOST.append(lambda: 1 / 0)


@fake("fuzz", Level.STATEFUL, explores=True)
def fuzz(run):
    "It draws random histories."
    run.measured["drawn"] = run.rng.random()


@fake("provisional", Level.STATEFUL, mandatory=False)
def provisional(run):
    "It fails and does not count yet."
    raise Failed("not yet right")


@fake("more", Level.STATEFUL, family=Family.UNDERDECLARED)
def more(run):
    "More works than is declared."


@fake("later", Level.STATEFUL, since=2)
def later(run):
    "It belongs to a contract that is not there yet."
    raise Failed("must not run")
'''

TOML = """
[pytest]
addopts = ["-p", "slotline.testing.plugin"]
consider_namespace_packages = true
slotline_plugin = "./tiny.py:descriptor"
"""


def author_folder(folder: Path, *settings: str) -> Path:
    """A folder with the plugin and a pytest.toml; `settings` are more lines of it."""
    (folder / "tiny.py").write_text(TINY)
    (folder / "pytest.toml").write_text("\n".join([TOML.strip(), *settings]) + "\n")
    return folder


def pytest_run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The suite, as an author starts it."""
    return python_run(
        folder, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "slotline.conformance", *options
    )


def slotline_run(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line; `path` is importable."""
    return python_run(folder, "-P", "-m", "slotline", *arguments, path=path)


def python_run(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own."""
    search = [*([str(path)] if path else []), *sys.path]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), "COLUMNS": "200"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def fake_check(name: str, level: Level, **rest: Any) -> Check:
    """A check of no plugin, which is not registered."""

    def function(run: Run) -> None:
        assert run is not None

    values = {"id": f"kv_spec.fake.{name}", "summary": f"{name} works.", "needs": {}, "cases": lambda subject: ({},)}
    return Check(**{"kind": Kind.KV_SPEC, "level": level, "function": function, **values, **rest})
