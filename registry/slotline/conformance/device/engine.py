"""L5: whole texts on the device, with graphs and without, and the texts of the CPU where its plugins run."""

from __future__ import annotations

from typing import Any

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.engine import CHUNKED, WHOLE, Tokens, selection, text
from slotline.testing.subject import Subject

SMALL: dict[str, Any] = {"cache.memory": "64MiB", "scheduler.max_requests": 4}
GRAPHS: dict[str, Any] = {"graphs.sizes": (1, 2, 4)}


@check(
    Kind.DEVICE,
    "device.engine.text",
    Level.ENGINE,
    cases=lambda _: ({"steps": steps} for steps in ("whole", "chunked")),
    cost=10.0,
)
def engine_text(run: Run) -> None:
    """Greedy texts equal those of the CPU, if the CPU's plugins run on the device, else those without graphs."""
    subject = run.subject
    settings = {**(WHOLE if run["steps"] == "whole" else CHUNKED), **SMALL}
    name, plugins = subject.name, tuple(selection(subject))
    if "cpu" in (name, *subject.capabilities.compatible_with):
        wanted = _text("cpu", (), settings)
    elif subject.capabilities.graphs.support:
        wanted = _text(name, plugins, {**settings, "graphs.mode": "none"})
    else:
        raise NotApplicable("neither the CPU's plugins run on it, nor graphs")
    found = _text(_named(subject), plugins, settings | (GRAPHS if subject.capabilities.graphs.support else {}))
    if found != wanted:
        differ = [number for number, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1]]
        raise Failed(f"other tokens, for the prompts {differ}: {found[differ[0]]}, expected {wanted[differ[0]]}")


def _named(subject: Subject) -> str:
    """Return the device string that a configuration would have."""
    return subject.name if subject.capabilities.host_memory.support else f"{subject.name}:0"


def _text(device: str, plugins: tuple[str, ...], settings: dict[str, Any]) -> Tokens:
    return text(device, plugins, tuple(settings.items()))
