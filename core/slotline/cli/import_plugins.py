"""Process in which `slotline doctor` and `slotline plugins --load` try plugins.

It writes lines of JSON as it goes, so that results are not lost when a plugin kills it: `trying` before a plugin
runs, `done` after. Descriptors come first and factories after them, since factories may import torch and descriptors
may not. What needs the machine's description comes last.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from slotline.registry.config import load_config
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import SlotlineError
from slotline.registry.loading import resolve_factory, resolve_options


def main() -> None:
    """Try the plugins of the order in the first argument, see `slotline.cli.trial`."""
    order = json.loads(sys.argv[1])
    registry = PluginRegistry.discover(load_config(order["config"], overrides=order["overrides"]), tolerant=True)
    reports = {label: _descriptor(registry, label) for label in order["labels"]}
    for label, report in reports.items():
        if order["factories"] and not report["error"]:
            report |= _factory(registry, label)
    for label, report in reports.items():
        if report["contract"]:
            report |= _verdict(registry, label)
        _say({"label": label, "event": "done", **report})
    os._exit(0)  # a plugin's exit handlers are not tested


def _descriptor(registry: PluginRegistry, label: str) -> dict[str, Any]:
    """Import the descriptor and the options class. Note whether that imported torch."""
    _say({"label": label, "event": "trying"})
    had_torch = "torch" in sys.modules
    contract, error, fix = "", "", ""
    try:
        descriptor = registry.load(*_key(label), required=True)
        contract = str(descriptor.contract)
        resolve_options(descriptor)
    except SlotlineError as problem:
        error, fix = problem.message, problem.fix or ""
    return {"contract": contract, "error": error, "fix": fix, "torch": not had_torch and "torch" in sys.modules}


def _factory(registry: PluginRegistry, label: str) -> dict[str, Any]:
    _say({"label": label, "event": "trying"})
    try:
        resolve_factory(registry.load(*_key(label), required=True))
    except SlotlineError as problem:
        return {"error": problem.message, "fix": problem.fix or "", "missing": _missing(problem)}
    return {}


def _missing(problem: SlotlineError) -> str:
    """Return the package whose absence is the cause, or nothing."""
    cause = problem.__cause__
    return (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""


def _verdict(registry: PluginRegistry, label: str) -> dict[str, Any]:
    from slotline.cli.runs_here import verdict

    _say({"label": label, "event": "trying"})
    devices, why_not = verdict(registry.load(*_key(label), required=True))
    return {"devices": devices, "why_not": why_not}


def _key(label: str) -> tuple[Kind, str]:
    kind, _, name = label.partition(":")
    return Kind(kind), name


def _say(event: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(event)}\n")
    sys.stdout.flush()
