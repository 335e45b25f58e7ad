"""Make docs/support-matrix.md: what the plugins of this repository show in the conformance suite.

    python docs/matrix.py --run REPORTS [--device cpu] [KIND:NAME ...]   # run the suite, a report each in a folder
    python docs/matrix.py REPORTS                                        # write the page from a folder of reports
    python docs/matrix.py --check                                        # exit 1 if the page misses a plugin or a check

Running everything takes ten minutes on two cores, so the page is made now and then, and `make check` only sees whether
it is of the plugins and checks that there are.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

PAGE = Path(__file__).parent / "support-matrix.md"
KINDS = ("attention", "state", "kv_spec", "drafter", "logits_processor", "lora", "structured_output")
HEAD = """# What our plugins do

Made by `python docs/matrix.py` from reports of `slotline conform KIND:NAME --report ...`, one for each column: nothing
here is a declaration. CPU: 2 cores of an EPYC; GPU: one H200. docs/conformance.md says what levels and checks are.
Columns of the GPU are of earlier runs of the suite: a check that is newer has not been run there.

"""


def ours() -> list[str]:
    """The plugins that this distribution brings, as KIND:NAME."""
    return [
        f"{kind}:{point.name}"
        for kind in KINDS
        for point in sorted(entry_points(group=f"slotline.{kind}"), key=lambda point: point.name)
        if point.dist is not None and point.dist.name == "slotline"
    ]


def run(folder: Path, device: str, names: list[str]) -> None:
    """Write a report of each plugin, as KIND-NAME-DEVICE.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ours():
        report = folder / f"{name.replace(':', '-')}-{device}.json"
        command = [sys.executable, "-m", "slotline", "conform", name, "--device", device, "--report", str(report)]
        code = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode
        sys.stderr.write(f"{name} on {device}: {'a' if report.exists() else 'no'} report, exit code {code}\n")


def page(folder: Path) -> str:
    """The page: a table for each kind, and the plugins without a report."""
    from slotline.testing.matrix import tables, to_markdown
    from slotline.testing.report import Report

    reports = [Report.load(path) for path in sorted(folder.glob("*.json"))]
    reports.sort(key=lambda report: KINDS.index(str(report.plugin.kind)))
    shown = {f"{report.plugin.kind}:{report.plugin.name}" for report in reports}
    missing = [f"`{name}`" for name in ours() if name not in shown]
    text = HEAD + re.sub(r"^### ", "## ", to_markdown(tables(reports)), flags=re.MULTILINE)
    return text + (f"\nWithout a report here: {', '.join(missing)}.\n" if missing else "")


def gaps() -> list[str]:
    """Plugins and checks that there are and the page does not name, and checks that it names and are no more."""
    from slotline.registry.descriptor import Kind
    from slotline.testing.check import all_checks

    text = PAGE.read_text(encoding="utf-8")
    kinds = [kind for kind in KINDS if f"\n## {kind}\n" in text]
    checks = {check.id for kind in kinds for check in all_checks(Kind(kind))}
    named = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    plugins = [name for name in ours() if not re.search(rf"\| {name.split(':')[1]}( \(\w+\))? \||`{name}`", text)]
    return [*plugins, *sorted(checks ^ named)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="?", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        found = gaps()
        if found:
            sys.stderr.write(f"docs/support-matrix.md is stale, run python docs/matrix.py: {', '.join(found)}\n")
        return int(bool(found))
    if arguments.reports is None:
        parser.error("name a folder of reports")
    if arguments.run:
        run(arguments.reports, arguments.device, arguments.names)
    else:
        PAGE.write_text(page(arguments.reports), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
