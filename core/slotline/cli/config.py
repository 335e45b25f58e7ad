"""`slotline config show` and `slotline config check`: the resolved configuration, and its faults."""

from __future__ import annotations

import argparse

from slotline.cli.command import (
    Command,
    add_config_options,
    add_json_option,
    add_traceback_option,
    load,
    print_inline,
    print_json,
    warn,
)
from slotline.registry.config import LoadedConfig, show
from slotline.registry.discovery import PluginRegistry


def _configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="show | check", required=True)
    shown = actions.add_parser("show", help="print the whole configuration, defaults included")
    add_config_options(shown, positional=True)
    shown.add_argument("--origin", action="store_true", help="say where each value came from")
    add_json_option(shown)
    add_traceback_option(shown, default=argparse.SUPPRESS)
    shown.set_defaults(run=_show)
    checked = actions.add_parser("check", help="look for mistakes, those in plugins' tables included")
    add_config_options(checked, positional=True)
    add_traceback_option(checked, default=argparse.SUPPRESS)
    checked.set_defaults(run=_check)


def _show(arguments: argparse.Namespace) -> int:
    loaded = load(arguments)
    if arguments.json:
        print_json(_as_json(loaded))
    else:
        print(show(loaded, origins=arguments.origin), end="")
    warn(loaded.warnings)
    return 0


def _as_json(loaded: LoadedConfig) -> dict[str, object]:
    import tomllib

    origins = {key: origin.where for key, origin in loaded.origins.items()}
    return {"config": tomllib.loads(show(loaded)), "origins": origins, "files": list(loaded.files)}


def _check(arguments: argparse.Namespace) -> int:
    loaded = load(arguments)
    registry = PluginRegistry.discover(loaded)
    registry.check_tables(loaded)
    warnings = tuple(dict.fromkeys((*loaded.warnings, *registry.warnings)))
    warn(warnings)
    name = arguments.config or "the default configuration"
    print(f"{name}: no errors" + (f", {_count(len(warnings), 'warning')}" if warnings else ""))
    print_inline(loaded)
    return 1 if warnings else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


COMMAND = Command(
    name="config",
    summary="show a configuration with defaults and origins, or check it",
    examples=(
        "slotline config show run.toml --origin",
        "slotline config show --set cache.block_size=32",
        "slotline config check run.toml",
    ),
    configure=_configure,
)
