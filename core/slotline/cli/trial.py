"""Trials of plugins in a process of their own: one that crashes or hangs there is a result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import frozen

SECONDS = 300.0
_CHILD = "from slotline.cli.import_plugins import main; main()"


@frozen(kw_only=True)
class Trial:
    """Result of trying a plugin.

    Attributes:
        label: ``kind:name``.
        contract: its contract versions, empty if its descriptor does not import.
        error: the reason why it does not import, empty if it does.
        fix: the remedy.
        missing: the package whose absence is the error.
        torch: whether its descriptor's module imports torch.
        devices: of this machine, those that it runs on.
        why_not: the reason why there are none.
        crashed: the end of its process, if that crashed.
    """

    label: str
    contract: str = ""
    error: str = ""
    fix: str = ""
    missing: str = ""
    torch: bool = False
    devices: tuple[str, ...] = ()
    why_not: str = ""
    crashed: str = ""

    @property
    def runs_here(self) -> bool:
        """True if it can be used on this machine."""
        return bool(self.devices) and not self.error and not self.crashed


def try_plugins(
    labels: Iterable[str],
    *,
    factories: bool,
    config: str | None = None,
    overrides: Sequence[str] = (),
    seconds: float = SECONDS,
) -> Iterator[Trial]:
    """Import plugins and ask their probes. After a crash the rest is tried in another process.

    Args:
        labels: ``kind:name`` of each.
        factories: whether to import the factories too, which takes long.
        config, overrides: the configuration, for inline plugins.
        seconds: that one process may take.
    """
    left = dict.fromkeys(labels)
    while left:
        order = {"labels": list(left), "factories": factories, "config": config, "overrides": list(overrides)}
        events, ending = _run(order, seconds)
        for event in events:
            if event.pop("event") == "done":
                left.pop(event["label"])
                yield Trial(**{**event, "devices": tuple(event.get("devices", ()))})
        if left:
            tried = [event["label"] for event in events if event["label"] in left]
            label = tried[-1] if tried else next(iter(left))
            left.pop(label)
            yield Trial(label=label, crashed=ending)


def _run(order: dict[str, Any], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Return the process's events, in order, and its end."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    command = [sys.executable, "-P", "-c", _CHILD, json.dumps(order)]
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
        output, ending = done.stdout, _ending(done.returncode)
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"took more than {seconds:g} s"
    lines = output.decode(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"label"') and line.endswith("}")], ending


def _ending(code: int) -> str:
    if code < 0:
        return f"its process died of {signal.Signals(-code).name}"
    return f"its process left with code {code}"
