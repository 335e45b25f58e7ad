"""`slotline conform`: the conformance suite on one plugin, from any folder."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slotline.cli.command import Command, add_json_option, print_header, print_json
from slotline.cli.conform_run import require_packages, run_suite
from slotline.cli.conform_show import progress, show
from slotline.cli.conform_shrink import shrink_failures
from slotline.cli.table import print_table
from slotline.registry.config import load_config
from slotline.registry.descriptor import Kind
from slotline.registry.errors import ConfigError

if TYPE_CHECKING:
    from slotline.testing.check import Level
    from slotline.testing.target import Target

_NOT_CONFORMANT = 1


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plugin",
        metavar="NAME",
        help="NAME, kind:NAME, package.module:attribute, ./file.py:attribute, or vllm:package.module:attribute",
    )
    parser.add_argument("--kind", metavar="KIND", help="the plugin's kind, where a name has several")
    parser.add_argument("--level", metavar="L3", default="L5", help="the highest level to run (default: L5)")
    parser.add_argument("--device", metavar="cpu|cuda", help="where to run (default: a GPU that the plugin takes)")
    parser.add_argument(
        "--check", action="append", default=[], metavar="ID", help="this check, or those below this name; repeatable"
    )
    parser.add_argument("--exhaustive", action="store_true", help="all combinations of what is declared; takes long")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other random choices (default: 0)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key=value", help="a key of the plugin's own table; repeatable"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help="seconds that one run of a check may take (default: 600)",
    )
    parser.add_argument(
        "--session-timeout",
        type=float,
        default=math.inf,
        metavar="S",
        help="seconds for all of it; the report then says how many runs are missing (default: no limit)",
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="processes that share the runs (default: 1; pytest-xdist)"
    )
    parser.add_argument("--report", metavar="r.json", help="write the report")
    parser.add_argument("--junit", metavar="f.xml", help="write the report as JUnit XML")
    parser.add_argument("--badge", metavar="b.json", help="write a badge, in shields.io's endpoint form")
    parser.add_argument(
        "--shrink",
        metavar="DIR",
        help="make failing batches of an attention backend small, and write each as a pytest file",
    )
    parser.add_argument("--list", action="store_true", help="show the checks that would run, and run none")
    add_json_option(parser)


def positive(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _run(arguments: argparse.Namespace) -> int:
    require_packages(arguments.jobs)
    from slotline.testing.check import Level
    from slotline.testing.target import find_target

    try:
        level = Level.parse(arguments.level)
    except ValueError as error:
        raise ConfigError(f"--level: {error}") from error
    target = find_target(arguments.plugin, kind=_kind(arguments.kind))
    if arguments.list:
        return _list(arguments, target, level)
    _check_folders(arguments)
    with progress() as on_news:
        report = run_suite(
            list(_options(arguments, target.name)),
            on_news,
            arguments.timeout,
            arguments.jobs,
            arguments.session_timeout,
        )
    if arguments.report:
        report.save(Path(arguments.report))
    if arguments.junit:
        from slotline.testing.junit import to_junit

        Path(arguments.junit).write_text(to_junit(report), encoding="utf-8")
    if arguments.badge:
        from slotline.testing.badge import badge

        Path(arguments.badge).write_text(json.dumps(badge(report), indent=2) + "\n", encoding="utf-8")
    if arguments.json:
        print_json(report.to_json())
    else:
        print_header(load_config())
        show(report, tracebacks=arguments.traceback)
        if arguments.shrink:
            shrink_failures(report, target.name, arguments)
    good = report.clean if arguments.check else report.conformant
    return 0 if good else _NOT_CONFORMANT


def _kind(text: str | None) -> Kind | None:
    try:
        return None if text is None else Kind(text.replace("-", "_"))
    except ValueError as error:
        raise ConfigError(f"--kind: {text!r} is no kind of plugin", fix=f"use one of: {', '.join(Kind)}") from error


def _options(arguments: argparse.Namespace, name: str) -> Iterator[str]:
    yield f"--slotline-plugin={name}"
    yield f"--slotline-level={arguments.level}"
    yield f"--slotline-seed={arguments.seed}"
    if arguments.device:
        yield f"--slotline-device={arguments.device}"
    if arguments.exhaustive:
        yield "--slotline-exhaustive"
    yield from (f"--slotline-check={check}" for check in arguments.check)
    yield from (f"--slotline-options={setting}" for setting in arguments.set)


def _check_folders(arguments: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before minutes are spent on their content.

    Raises:
        ConfigError: naming the option.
    """
    if arguments.shrink and (arguments.json or not Path(arguments.shrink).is_dir()):
        why = "it prints beside the report" if arguments.json else f"there is no folder {arguments.shrink!r}"
        raise ConfigError(f"--shrink: {why}", fix="leave --json out" if arguments.json else "make it first")
    for option in ("report", "junit", "badge"):
        file = getattr(arguments, option)
        if file and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"--{option} {file}: there is no folder {str(Path(file).parent)!r}", fix="make it first")


def _list(arguments: argparse.Namespace, target: Target, level: Level) -> int:
    """List the selected checks in this process."""
    from slotline.testing.pytest_options import read_settings
    from slotline.testing.selection import select
    from slotline.testing.subject import subject_of

    subject = subject_of(
        target,
        device=arguments.device,
        options=read_settings(arguments.set),
        exhaustive=arguments.exhaustive,
        seed=arguments.seed,
    )
    items = select(subject, level, arguments.check)
    if arguments.json:
        print_json([{"key": item.key, "level": str(item.check.level), "skip": item.skip} for item in items])
        return 0
    rows: dict[str, list[str]] = {}
    for item in items:
        check = item.check
        row = rows.setdefault(check.id, [str(check.level), check.id, check.profile, "0", check.summary])
        row[3] = "-" if item.skip else str(int(row[3]) + 1)
        row[4] = item.skip or check.summary
    print_table(("level", "check", "profile", "runs", "what it shows, or why it is skipped"), [*rows.values()])
    return 0


COMMAND = Command(
    name="conform",
    summary="run the conformance suite on a plugin",
    examples=(
        "slotline conform attention:torch",
        "slotline conform attention:my_attn --level L3 --report r.json --badge badge.json",
        "slotline conform ./mine.py:Mine --check attention.window",
        "slotline conform ./mine.py:Mine --level L2 --shrink failures",
        "slotline conform attention:torch --list",
    ),
    configure=_configure,
    run=_run,
)
