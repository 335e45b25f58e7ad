"""`slotline matrix`: the support table, from the reports of `slotline conform`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slotline.cli.command import Command

if TYPE_CHECKING:
    from slotline.testing.report import Report


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", metavar="r.json", help="reports, a column for each")
    parser.add_argument("--format", choices=("md", "html"), help="default: by the name of --out, else md")
    parser.add_argument("--out", metavar="FILE", help="write it there instead of standard output")
    parser.add_argument("--badges", metavar="DIR", help="write a badge for each report there, as KIND-NAME.json")


def _run(arguments: argparse.Namespace) -> int:
    from slotline.testing.matrix import tables, to_html, to_markdown
    from slotline.testing.report import Report

    reports = [Report.load(Path(name)) for name in arguments.reports]
    by_name = "html" if str(arguments.out or "").endswith((".html", ".htm")) else "md"
    text = (to_html if (arguments.format or by_name) == "html" else to_markdown)(tables(reports))
    if arguments.out:
        Path(arguments.out).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    if arguments.badges:
        _write_badges(reports, Path(arguments.badges))
    return 0


def _write_badges(reports: Sequence[Report], folder: Path) -> None:
    from slotline.testing.badge import badge

    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        file = folder / f"{report.plugin.kind}-{report.plugin.name}.json"
        file.write_text(json.dumps(badge(report), indent=2) + "\n", encoding="utf-8")


COMMAND = Command(
    name="matrix",
    summary="render the support table from conformance reports",
    examples=(
        "slotline matrix torch.json cpu.json",
        "slotline matrix reports/*.json --out support.html --badges badges",
    ),
    configure=_configure,
    run=_run,
)
