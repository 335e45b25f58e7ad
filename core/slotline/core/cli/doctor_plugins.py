"""Checks of the plugins: names, contracts, and whether each can be imported, tried in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slotline.core.cli.finding import Finding, Status
from slotline.registry.config import load_config
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.records import PluginRecord, PluginState

SECONDS_FOR_IMPORTS = 300.0
_CHILD = "from slotline.core.cli.import_plugins import main; main()"


def check_duplicates() -> Iterator[Finding]:
    """Names that two distributions offer, and rules that nothing answers to."""
    registry = PluginRegistry.discover(load_config(), tolerant=True)
    rows = registry.records()
    failed = [row for row in rows if row.state is PluginState.FAILED]
    for row in failed:
        yield Finding(Status.FAIL, row.label, row.error, f"see [plugins] distribution and block; it lies in {row.path}")
    for text in registry.warnings:
        yield Finding(Status.WARN, "plugin rules", text, "correct the [plugins] table or the environment")
    if not failed:
        names, sources = len({row.label for row in rows}), sorted({row.distribution for row in rows})
        yield Finding(Status.OK, "plugin names", f"{names} plugins of {', '.join(sources)}; no name is offered twice")


def check_imports() -> Iterator[Finding]:
    """Import every plugin: descriptor, options and factory. A plugin that kills its process is a row."""
    rows = PluginRegistry.discover(load_config(), tolerant=True).records()
    todo = [row for row in rows if isinstance(row.kind, Kind) and row.state is PluginState.AVAILABLE]
    return import_findings(todo)


def import_findings(rows: Sequence[PluginRecord], seconds: float = SECONDS_FOR_IMPORTS) -> Iterator[Finding]:
    """One row for each plugin; after a crash the rest is tried in another process."""
    left = {row.label: row for row in rows}
    while left:
        events, ending = _import(list(left), seconds)
        for event in events:
            if event["event"] == "done":
                yield _judge(left.pop(event["label"]), event)
        if left:
            tried = [event["label"] for event in events if event["label"] in left]
            row = left.pop(tried[-1] if tried else next(iter(left)))
            yield Finding(Status.FAIL, row.label, f"{ending} while it was imported", _repair(row))


def _import(labels: Sequence[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """What the import process said, in order, and how it ended."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    command = [sys.executable, "-P", "-c", _CHILD, *labels]
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=seconds, check=False)
        output, ending = done.stdout, _ending(done.returncode)
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"took more than {seconds:g} s"
    lines = output.decode(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"label"')], ending


def _ending(code: int) -> str:
    if code < 0:
        return f"its process died of {signal.Signals(-code).name}"
    return f"its process left with code {code}"


def _judge(row: PluginRecord, report: Mapping[str, Any]) -> Finding:
    source = f"{row.source}, contract {report['contract']}" if report["contract"] else row.source
    if report["error"]:
        return Finding(Status.FAIL, row.label, f"{row.source}: {report['error']}", report["fix"] or _repair(row))
    if report["torch"]:
        fix = "name the factory by a path, so that the descriptor's module needs no torch"
        return Finding(Status.WARN, row.label, f"{source}: its descriptor's module imports torch", fix)
    return Finding(Status.OK, row.label, source)


def _repair(row: PluginRecord) -> str:
    return f"repair or uninstall {row.distribution}, or set plugins.block = ['{row.label}']"
