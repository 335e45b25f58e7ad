"""The command line. One file per command; a command imports what it needs when it runs, so light ones stay light.

Exit codes: 0 all right, 1 the command's own "no" (no plan, warnings), 2 an error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from slotline.core.cli.command import Command
from slotline.registry.errors import SlotlineError

__all__ = ["main"]

_COMMANDS = (
    "generate",
    "explain",
    "plugins",
    "doctor",
    "schema",
    "config",
    "bench",
    "tune",
    "new_plugin",
    "conform",
    "matrix",
)
_EXAMPLES = """examples:
  slotline generate "def main("
  slotline explain run.toml
  slotline plugins
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; None for those of the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: for `--help`, `--version` and arguments that cannot be parsed.
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return int(arguments.run(arguments))
    except SlotlineError as error:
        if arguments.traceback:
            traceback.print_exc()
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a file that cannot be written, a disk that is full
        if isinstance(error, BrokenPipeError):  # whoever read our output stopped; nothing may be flushed at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if arguments.traceback:
            traceback.print_exc()
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="slotline",
        description="Run language models through slots, and see which plugin fills which and why.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slotline {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in _COMMANDS:
        command: Command = import_module(f"{__name__}.{name}").COMMAND
        command.add_to(commands)
    return parser


def _version() -> str:
    try:
        return version("slotline")
    except PackageNotFoundError:
        return "(not installed)"
