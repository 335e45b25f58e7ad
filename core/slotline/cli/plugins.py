"""`slotline plugins`: every plugin of this environment and its state. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from slotline.cli.command import Command, add_config_options, add_json_option, load, overrides, print_json, warn
from slotline.cli.table import print_table, without_empty_columns
from slotline.cli.trial import Trial, try_plugins
from slotline.registry.descriptor import HOST_CONTRACTS, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.records import PROJECT, PluginRecord, PluginState, canonical

_HEADERS = ("kind", "name", "from", "contract", "state", "runs here", "error", "path")
_OPEN = (PluginState.AVAILABLE, PluginState.LOADED, PluginState.SELECTED)


def _configure(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    parser.add_argument(
        "--load", action="store_true", help="import every plugin, so that broken ones say why, and ask which run here"
    )
    parser.add_argument("--slots", action="store_true", help="show the slots, with contract version, hook and plugins")
    add_json_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    registry = PluginRegistry.discover(load(arguments), tolerant=True)
    if arguments.slots:
        return _show_slots(registry, as_json=arguments.json)
    trials: dict[str, Trial] = {}
    if arguments.load:
        for kind in Kind:
            registry.candidates(kind)
        labels = [row.label for row in registry.records() if isinstance(row.kind, Kind) and row.state in _OPEN]
        found = try_plugins(labels, factories=False, config=arguments.config, overrides=overrides(arguments))
        trials = {trial.label: trial for trial in found}
    warn(registry.warnings)
    rows = registry.records()
    if arguments.json:
        print_json([_as_json(row, trials.get(row.label)) for row in rows])
        return 0
    own = {row.path for row in rows if canonical(row.distribution) == PROJECT}
    cells = [_cells(row, trials.get(row.label), own) for row in rows]
    print_table(*without_empty_columns(_HEADERS, cells, ("error", "path")))
    return 0


def _show_slots(registry: PluginRegistry, *, as_json: bool) -> int:
    """Print each slot: contract versions of this slotline, hook, and the names of its plugins."""
    slots = [
        {
            "slot": kind.value,
            "contract": str(HOST_CONTRACTS[kind]),
            "hook": kind.hook,
            "plugins": sorted(row.name for row in registry.records() if row.kind is kind and row.state in _OPEN),
        }
        for kind in Kind
    ]
    if as_json:
        print_json(slots)
        return 0
    cells = [(s["slot"], s["contract"], s["hook"], ", ".join(s["plugins"]) or "-") for s in slots]
    print_table(("slot", "contract", "hook", "plugins"), [tuple(map(str, row)) for row in cells])
    return 0


def _as_json(row: PluginRecord, trial: Trial | None) -> dict[str, Any]:
    return {
        "kind": _kind(row),
        "name": row.name,
        "distribution": row.distribution,
        "version": row.version,
        "contract": _contract(row),
        "state": row.state.value,
        "error": row.error,
        "runs_here": _runs_here(row, trial),
        "devices": list(trial.devices) if trial else [],
        "why_not": _why_not(trial) if trial else "",
        "path": row.path,
        "value": row.value,
        "inline": row.inline,
        "summary": row.descriptor.summary if row.descriptor else "",
    }


def _cells(row: PluginRecord, trial: Trial | None, own: Collection[str]) -> tuple[str, ...]:
    """Return a row's cells. A path is shown if it is not in the folder of slotline itself."""
    source = f"{row.distribution} {row.version}" if row.distribution else "inline"
    error = row.error.splitlines()[0] if row.error else ""
    runs = {True: "yes", False: "no", None: "-"}[_runs_here(row, trial)]
    reason = _why_not(trial) if trial else ""
    path = "" if row.path in own else row.path
    return (
        _kind(row),
        row.name,
        source,
        _contract(row) or "-",
        row.state.value,
        f"{runs}: {reason}" if reason else runs,
        error,
        path,
    )


def _runs_here(row: PluginRecord, trial: Trial | None) -> bool | None:
    """Return whether a plugin can be used here, or None if it was not tried."""
    if trial is not None:
        return trial.runs_here
    return None if row.state in _OPEN else False


def _why_not(trial: Trial) -> str:
    return trial.crashed or trial.error or trial.why_not


def _kind(row: PluginRecord) -> str:
    return row.kind.value if isinstance(row.kind, Kind) else row.kind


def _contract(row: PluginRecord) -> str:
    """Return the plugin's contract range, and the bound version if its text differs.

    The text is empty until the plugin is loaded.
    """
    if row.descriptor is None:
        return ""
    spoken = row.descriptor.contract
    bound = HOST_CONTRACTS[row.descriptor.kind].common(spoken)
    return str(spoken) if bound is None or str(spoken) == str(bound) else f"{spoken}, bound {bound}"


COMMAND = Command(
    name="plugins",
    summary="list the installed plugins and their state",
    examples=(
        "slotline plugins",
        "slotline plugins --slots",
        "slotline plugins --load",
        "slotline plugins --config run.toml --json",
    ),
    configure=_configure,
    run=_run,
)
