"""`slotline plugins`: every plugin of this environment and where it stands. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from slotline.core.cli.command import Command, add_config_options, add_json_option, load, print_json, warn
from slotline.core.cli.table import print_table
from slotline.registry.descriptor import HOST_CONTRACTS, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.records import PluginRecord

_HEADERS = ("kind", "name", "from", "contract", "state", "error", "path")


def _configure(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    parser.add_argument("--load", action="store_true", help="import every plugin, so that broken ones say why")
    add_json_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    registry = PluginRegistry.discover(load(arguments), tolerant=True)
    if arguments.load:
        for kind in Kind:
            registry.candidates(kind)
    warn(registry.warnings)
    rows = registry.records()
    if arguments.json:
        print_json([_as_json(row) for row in rows])
    else:
        print_table(_HEADERS, [_cells(row) for row in rows])
    return 0


def _as_json(row: PluginRecord) -> dict[str, Any]:
    return {
        "kind": _kind(row),
        "name": row.name,
        "distribution": row.distribution,
        "version": row.version,
        "contract": _contract(row),
        "state": row.state.value,
        "error": row.error,
        "path": row.path,
        "value": row.value,
        "inline": row.inline,
        "summary": row.descriptor.summary if row.descriptor else "",
    }


def _cells(row: PluginRecord) -> tuple[str, ...]:
    source = f"{row.distribution} {row.version}" if row.distribution else "inline"
    error = row.error.splitlines()[0] if row.error else ""
    return (_kind(row), row.name, source, _contract(row) or "-", row.state.value, error, row.path)


def _kind(row: PluginRecord) -> str:
    return row.kind.value if isinstance(row.kind, Kind) else row.kind


def _contract(row: PluginRecord) -> str:
    """The plugin's range, and the bound version where it is another text; empty until the plugin is loaded."""
    if row.descriptor is None:
        return ""
    spoken = row.descriptor.contract
    bound = HOST_CONTRACTS[row.descriptor.kind].common(spoken)
    return str(spoken) if bound is None or str(spoken) == str(bound) else f"{spoken}, bound {bound}"


COMMAND = Command(
    name="plugins",
    summary="list the installed plugins and their state",
    examples=("slotline plugins", "slotline plugins --load", "slotline plugins --config run.toml --json"),
    configure=_configure,
    run=_run,
)
