"""The command line. There is a file per command. A command imports its modules when it runs, so light ones stay light.

Exit codes: 0 success, 1 the command's own "no" (no plan, warnings), 2 an error, 130 interrupted.
"""

from __future__ import annotations

import sys

from slotline.cli.process import INTERRUPTED, closed_by_reader, end_without_collections, run_process

TYPE_CHECKING = False  # an interrupt while `typing` is imported would be a traceback
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from slotline.cli.process import Interrupts

__all__ = ["build_parser", "main"]

_COMMANDS = (
    "generate",
    "chat",
    "serve",
    "route",
    "batch",
    "explain",
    "plugins",
    "doctor",
    "schema",
    "config",
    "bench",
    "tune",
    "save_weights",
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
        argv: the arguments after the program's name. None takes those of the process, which is then the command's:
            its standard streams and interrupts are looked after too, and nothing but the exit code is raised.

    Returns:
        The exit code.

    Raises:
        SystemExit: for `--help`, `--version` and arguments that cannot be parsed.
    """
    return run_process(_run_alone) if argv is None else _run(argv, None)


def _run_alone(interrupts: Interrupts) -> int:
    """Run the command that is the whole of this process."""
    from slotline.registry.lean_start import lean_start

    with lean_start():
        try:
            return _run(None, interrupts)
        finally:
            end_without_collections()  # with the usual threshold back, a collection would look at all objects


def _run(argv: Sequence[str] | None, interrupts: Interrupts | None) -> int:
    """Run a command. `interrupts` start once all modules are imported that the command needs."""
    from slotline.cli.launched import said_by_rank_0, take_role
    from slotline.registry.errors import SlotlineError

    given = sys.argv[1:] if argv is None else argv
    parser = build_parser(given[0] if given else None)
    if interrupts is not None:
        interrupts.start()
    arguments = parser.parse_args(given)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    take_role()
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:
        return closed_by_reader()
    except (SlotlineError, OSError) as error:  # OSError: a file that cannot be written, a disk that is full
        if interrupts is not None and interrupts.seen:  # in a library, which made another error of it
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        if arguments.traceback:
            import traceback

            traceback.print_exc()
        else:
            print(said_by_rank_0(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser(named: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of all commands, or of one.

    Args:
        named: the first argument. If it is a command, the modules of the others are not imported.
    """
    import argparse
    from importlib import import_module

    parser = argparse.ArgumentParser(
        prog="slotline",
        description="Run language models through slots, and see which plugin fills which and why.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slotline {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    alone = (named or "").replace("-", "_")
    for name in (alone,) if alone in _COMMANDS else _COMMANDS:
        command = import_module(f"{__name__}.{name}").COMMAND
        command.add_to(commands)
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("slotline")
    except PackageNotFoundError:
        return "(not installed)"
