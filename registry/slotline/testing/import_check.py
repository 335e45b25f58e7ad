"""Check that a plugin's descriptor can be imported without torch, run in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys

from slotline.registry.records import installed_records
from slotline.testing.check import Failed, NotApplicable
from slotline.testing.subject import Subject

_CODE = "import importlib, sys; importlib.import_module(sys.argv[1]); sys.exit(3 if 'torch' in sys.modules else 0)"
SECONDS = 120


def imports_without_torch(subject: Subject) -> None:
    """Import the module of the descriptor afresh.

    Raises:
        NotApplicable: if the plugin was not given by its entry point.
        Failed: if torch was imported too, or the module cannot be imported by itself.
    """
    where = _module(subject)
    command = [sys.executable, "-c", _CODE, where]
    search = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode == 3:
        raise Failed(
            f"importing {where} imports torch, which takes seconds; give factory, probe and options as dotted paths"
        )
    if done.returncode:
        raise Failed(f"importing {where} in a fresh process fails: {done.stderr.strip().splitlines()[-1:]}")


def _module(subject: Subject) -> str:
    """Return the module that discovery would import."""
    for row in installed_records():
        same = (row.kind, row.name) == (subject.descriptor.kind, subject.descriptor.name)
        if same and subject.target in (row.label, row.name, row.value):
            return row.value.partition(":")[0]
    raise NotApplicable("no entry point names it, so that discovery does not import it")
