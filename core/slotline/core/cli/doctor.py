"""`slotline doctor`: is this environment right, and what to do where it is not."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from slotline.core.cli import doctor_install, doctor_machine, doctor_plugins
from slotline.core.cli.command import Command, add_json_option, print_header, print_json
from slotline.core.cli.finding import Finding, Status
from slotline.core.cli.table import print_table
from slotline.registry.config import load_config
from slotline.registry.errors import SlotlineError

_CHECKS: Sequence[Callable[[], Iterable[Finding]]] = (
    doctor_install.check_versions,
    doctor_install.check_namespace,
    doctor_install.check_installation,
    doctor_machine.check_processor,
    doctor_machine.check_gpu,
    doctor_plugins.check_duplicates,
    doctor_plugins.check_imports,
    doctor_machine.check_small_model,
)


def _configure(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    findings = [finding for check in _CHECKS for finding in _findings(check)]
    worst = max((finding.status for finding in findings), default=Status.OK)
    if arguments.json:
        print_json({"status": worst.label, "findings": [finding.to_json() for finding in findings]})
        return int(worst)
    with suppress(SlotlineError):  # the checks say what is wrong
        print_header(load_config())
    print_table(("status", "check", "found"), [(f.status.label, f.check, f.text) for f in findings])
    fixes = [f"  {f.check}: {f.fix}" for f in findings if f.fix and f.status is not Status.OK]
    print("\n".join(["", "what to do", *fixes]) if fixes else "\nnothing to do")
    return int(worst)


def _findings(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What a check finds; one that breaks is itself a finding, so that the others still run."""
    try:
        return list(check())
    except Exception as error:
        text = f"the check broke: {type(error).__name__}: {error}"
        return [Finding(Status.FAIL, check.__name__.removeprefix("check_"), text, "report this")]


COMMAND = Command(
    name="doctor",
    summary="check versions, machine, plugins and installation; exit code 0 all right, 1 warnings, 2 failures",
    examples=("slotline doctor", "slotline doctor --json"),
    configure=_configure,
    run=_run,
)
