"""The process in which `slotline doctor` imports plugins: one line of JSON for each, as soon as it is known."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import SlotlineError
from slotline.registry.loading import resolve_factory, resolve_options


def main() -> None:
    """Import the plugins named in the arguments, ``kind:name`` each: descriptor and options, then the factory."""
    registry = PluginRegistry.discover(tolerant=True)
    had_torch = "torch" in sys.modules
    labels = sys.argv[1:]
    for label in labels:
        report = _report(registry, label)
        report["torch"] = not had_torch and "torch" in sys.modules
        sys.stdout.write(f"{json.dumps(report)}\n")
        sys.stdout.flush()
        if report["torch"] or not report["error"]:
            _continue_alone(labels[labels.index(label) + 1 :])
    os._exit(0)  # a plugin's exit handlers are not what is tested
