"""`slotline doctor`: faults of this environment, each with its remedy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import attrs

from slotline.cli import doctor_install, doctor_machine, doctor_plugins
from slotline.cli.command import Command, add_json_option, print_header, print_json
from slotline.cli.finding import Finding, Status
from slotline.cli.table import print_table
from slotline.registry.config import load_config
from slotline.registry.errors import SlotlineError

_CHECKS: Sequence[tuple[str, Callable[[], Iterable[Finding]]]] = (
    ("installation", doctor_install.check_versions),
    ("installation", doctor_install.check_companions),
    ("installation", doctor_install.check_namespace),
    ("installation", doctor_install.check_installation),
    ("installation", doctor_plugins.check_configuration),
    ("installation", doctor_plugins.check_duplicates),
    ("machine", doctor_machine.check_processor),
    ("machine", doctor_machine.check_gpu),
    ("machine", doctor_machine.check_small_model),
    ("plugins", doctor_plugins.check_imports),
)


def _configure(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    findings = [finding for group, check in _CHECKS for finding in _findings(group, check)]
    worst = max((finding.status for finding in findings), default=Status.OK)
    if arguments.json:
        overall = Status.OK if worst is Status.OPTIONAL else worst
        print_json({"status": overall.label, "findings": [finding.to_json() for finding in findings]})
        return worst.exit_code
    with suppress(SlotlineError):  # the checks report the error
        print_header(load_config())
    for group in dict.fromkeys(finding.group for finding in findings):
        _show(group, [finding for finding in findings if finding.group == group])
    fixes = [f"  {f.check}: {f.fix}" for f in findings if f.fix and f.status > Status.OPTIONAL]
    print("\n".join(["what to do", *fixes]) if fixes else "nothing to do")
    return worst.exit_code


def _show(group: str, findings: Sequence[Finding]) -> None:
    """Print the table of one group. Plugins have a column that says whether they run here."""
    print(group)
    if all(finding.runs_here is None for finding in findings):
        print_table(("status", "check", "found"), [(f.status.label, f.check, f.text) for f in findings], indent=2)
    else:
        cells = [(f.status.label, f.check.partition(":")[2] or f.check, _runs(f), f.text) for f in findings]
        print_table(("status", "name", "runs here", "found"), cells, indent=2)
    print()


def _runs(finding: Finding) -> str:
    if finding.runs_here is None:
        return ""
    return "yes" if finding.runs_here else f"no: {finding.why_not}"


def _findings(group: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check. A check that breaks is itself a finding, so that the others still run."""
    name = check.__name__.removeprefix("check_")
    try:
        return [finding if finding.group else attrs.evolve(finding, group=group) for finding in check()]
    except SlotlineError as error:
        text = " ".join(line.strip() for line in error.message.splitlines())
        return [Finding(Status.FAIL, name, text, error.fix or "correct what it names", group=group)]
    except Exception as error:
        text = f"the check broke: {type(error).__name__}: {error}"
        return [Finding(Status.FAIL, name, text, "report this", group=group)]


COMMAND = Command(
    name="doctor",
    summary="check versions, machine, plugins and installation; exit code 0 all right, 1 warnings, 2 failures",
    examples=("slotline doctor", "slotline doctor --json"),
    configure=_configure,
    run=_run,
)
