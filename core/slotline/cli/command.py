"""Commands of the command line, and the options that several of them share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Any

from attrs import frozen

from slotline.registry.config import LoadedConfig, load_config

if TYPE_CHECKING:
    from slotline.registry.discovery import PluginRegistry


@frozen(kw_only=True)
class Command:
    """One command of the command line.

    Attributes:
        name: as typed.
        summary: one line for the list of commands.
        examples: command lines for `--help`.
        configure: adds the command's arguments.
        run: does the work and returns the exit code. None if sub-commands set their own.
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int] | None = None

    def add_to(self, commands: Any) -> None:
        """Add the command to a parser's sub-parsers."""
        parser: argparse.ArgumentParser = commands.add_parser(
            self.name,
            help=self.summary,
            description=self.summary[0].upper() + self.summary[1:] + ".",
            epilog="\n".join(["examples:", *(f"  {line}" for line in self.examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_traceback_option(parser)
        self.configure(parser)
        if self.run is not None:
            parser.set_defaults(run=self.run)


def add_config_options(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Add the options of the configuration: `--config FILE` or a positional FILE, `--set`, `--strict`."""
    if positional:
        parser.add_argument("config", nargs="?", metavar="run.toml", help="a configuration file; none for the defaults")
    else:
        parser.add_argument("--config", metavar="run.toml", help="a configuration file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=value",
        help="set one key; may be repeated, the last one wins",
    )
    parser.add_argument("--strict", action="store_true", help="every downgrade and every plugin that fails is an error")


def add_traceback_option(parser: argparse.ArgumentParser, default: Any = False) -> None:
    """Add `--traceback`. A sub-parser leaves the default to its parent."""
    parser.add_argument("--traceback", action="store_true", default=default, help="show where an error comes from")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def overrides(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the `--set` options, with `--strict` as one of them."""
    return (*arguments.set, *(["strict=true"] if arguments.strict else []))


def load(arguments: argparse.Namespace, values: Mapping[str, Any] | None = None) -> LoadedConfig:
    """Load the configuration that the options name. `values` by dotted key win over everything.

    Raises:
        ConfigError: listing every fault.
    """
    return load_config(arguments.config, overrides=overrides(arguments), values=values)


def warn(lines: Iterable[str]) -> None:
    """Print each distinct warning once, on standard error."""
    for line in dict.fromkeys(lines):
        print(f"warning: {line}", file=sys.stderr)


def print_header(loaded: LoadedConfig, registry: PluginRegistry | None = None, width: int | None = None) -> None:
    """Print the lines that plugins have for the head of a report (`slotline_report_header`), in so many columns."""
    from slotline.registry.discovery import PluginRegistry

    registry = registry or PluginRegistry.discover(loaded, tolerant=True)
    for line in registry.hooks.report_header(loaded.config):
        print(line if width is None else fill(line, width, subsequent_indent="  "))


def print_inline(loaded: LoadedConfig) -> None:
    """Print a line for each inline plugin, so that no file runs unnamed."""
    for line in loaded.inline_files:
        print(f"inline code: {line}")


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
