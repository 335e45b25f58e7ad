"""`slotline schema`: the JSON Schema of the configuration file, installed plugins' tables included."""

from __future__ import annotations

import argparse

from slotline.cli.command import Command, print_json, warn
from slotline.registry.config import json_schema, load_config
from slotline.registry.discovery import PluginRegistry


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-plugins", action="store_true", help="leave the plugins' own tables out")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.no_plugins:
        print_json(json_schema())
        return 0
    registry = PluginRegistry.discover(load_config(), tolerant=True)
    print_json(json_schema(registry.option_classes()))
    warn(registry.warnings)
    warn(f"{row.label} is left out: {row.error}" for row in registry.records() if row.error)
    return 0


COMMAND = Command(
    name="schema",
    summary="print the JSON Schema of run.toml, with the tables of the installed plugins",
    examples=("slotline schema > run.schema.json", "slotline schema --no-plugins"),
    configure=_configure,
    run=_run,
)
