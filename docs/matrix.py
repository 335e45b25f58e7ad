"""Make docs/reference/support-matrix.md: what the plugins of this repository show in the conformance suite.

    python docs/matrix.py --run REPORTS [--device cpu] [KIND:NAME ...]   # run the suite, a report each in a folder
    python docs/matrix.py REPORTS                                        # bring a folder of reports into the page
    python docs/matrix.py --check                                        # exit 1 if the page misses a plugin or a check

Running everything takes ten minutes on two cores and GPUs are elsewhere, so the page is brought up to date in parts:
columns without a new report stay as they are. `make check` only sees whether the page is of the plugins and checks
that there are.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

if TYPE_CHECKING:
    from slotline.testing.matrix import Table

PAGE = Path(__file__).parent / "reference" / "support-matrix.md"
KINDS = (
    "attention",
    "state",
    "kv_spec",
    "kv_connector",
    "drafter",
    "logits_processor",
    "lora",
    "structured_output",
    "device",
)
HEAD = """# What our plugins do

Made by `python docs/matrix.py` from reports of `slotline conform KIND:NAME --report ...`, one for each column: nothing
here is a declaration. CPU: 2 cores of an EPYC; GPU: one H200. [Conformance](../conformance.md)
explains levels and checks. Columns of the GPU are of earlier runs of the suite: newer checks have not been run there.

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


def page(folder: Path, old: str) -> str:
    """The page: a table for each kind, of new reports and of the old page's other columns, and plugins without one."""
    from slotline.testing.matrix import tables, to_markdown
    from slotline.testing.report import Report

    new = {table.kind: table for table in tables(Report.load(path) for path in sorted(folder.glob("*.json")))}
    before = {table.kind: table for table in map(parsed, re.split(r"^## ", old, flags=re.MULTILINE)[1:])}
    merged = [
        before[kind] if kind not in new else joined(new[kind], before.get(kind, new[kind]))
        for kind in KINDS
        if kind in new or kind in before
    ]
    shown = {f"{table.kind}:{column.split(' ')[0]}" for table in merged for column in table.columns}
    missing = [f"`{name}`" for name in ours() if name not in shown]
    text = HEAD + re.sub(r"^### ", "## ", to_markdown(merged), flags=re.MULTILINE)
    said = textwrap.fill(f"Without a report here: {', '.join(missing)}.", 120, break_on_hyphens=False)
    return text + (f"\n{said}\n" if missing else "")


def parsed(text: str) -> Table:
    """A table of the page, from its heading on."""
    from slotline.testing.matrix import Cell, Row, Section, Table

    kind, *lines = text.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    facts, sections = [], []
    for first, profile, *cells in rows[2:]:
        if first.startswith("**"):
            sections.append((first.strip("*"), []))
        elif not sections:
            facts.append((first, tuple(cells)))
        else:
            found = [re.fullmatch(r"(\S+)(?: <sup>(\d+)</sup>)?", cell) for cell in cells]
            made = tuple(Cell(m[1], note=int(m[2]) if m[2] else None) for m in found if m)
            sections[-1][1].append(Row(first.strip("`"), "", profile, made))
    notes = tuple(line.split(". ", 1)[1] for line in lines if re.match(r"\d+\. ", line))
    built = tuple(Section(title, tuple(rows)) for title, rows in sections)
    return Table(kind, tuple(rows[0][2:]), tuple(facts), built, notes)


def joined(new: Table, old: Table) -> Table:
    """New columns, and those of the old table of another plugin or device.

    The checks are the new table's, and those that no new report ran.
    """
    from slotline.testing.matrix import NOT_RUN, Cell, Row, Section

    def keys(table: Table) -> list[tuple[str, str]]:
        devices = dict(table.facts)["device"]
        names = [column.split(" ")[0] for column in table.columns]
        return [(name, device.split(" ")[0]) for name, device in zip(names, devices, strict=True)]

    kept = [i for i, key in enumerate(keys(old)) if key not in keys(new)]
    all_keys = [*keys(new), *(keys(old)[i] for i in kept)]
    order = sorted(range(len(all_keys)), key=all_keys.__getitem__)
    names = [name for name, _ in all_keys]
    notes = list(new.notes)
    cells = {row.id: row.cells for section in old.sections for row in section.rows}

    def moved(cell: Cell) -> Cell:
        if cell.note is None:
            return cell
        text = old.notes[cell.note - 1]
        if text not in notes:
            notes.append(text)
        return evolve(cell, note=notes.index(text) + 1)

    def whole(row: Row) -> Row:
        found = cells.get(row.id)
        mine = [*row.cells, *(moved(found[i]) if found else Cell(NOT_RUN) for i in kept)]
        return evolve(row, cells=tuple(mine[i] for i in order))

    def left(row: Row) -> Row:
        mine = [*(Cell(NOT_RUN) for _ in new.columns), *(moved(row.cells[i]) for i in kept)]
        return evolve(row, cells=tuple(mine[i] for i in order))

    ran = {row.id for section in new.sections for row in section.rows}
    sections = {section.title: list(map(whole, section.rows)) for section in new.sections}
    for section in old.sections:
        if rows := [left(row) for row in section.rows if row.id not in ran]:
            sections.setdefault(section.title, []).extend(rows)

    def column(i: int) -> str:
        name, device = all_keys[i]
        return f"{name} ({device})" if names.count(name) > 1 else name

    before = dict(old.facts)
    facts = [(title, (*texts, *(before[title][i] for i in kept))) for title, texts in new.facts]
    return evolve(
        new,
        columns=tuple(column(i) for i in order),
        facts=tuple((title, tuple(texts[i] for i in order)) for title, texts in facts),
        sections=tuple(Section(title, tuple(rows)) for title, rows in sections.items()),
        notes=tuple(notes),
    )


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
            sys.stderr.write(
                f"docs/reference/support-matrix.md is stale, run python docs/matrix.py: {', '.join(found)}\n"
            )
        return int(bool(found))
    if arguments.reports is None:
        parser.error("name a folder of reports")
    if arguments.run:
        run(arguments.reports, arguments.device, arguments.names)
    else:
        PAGE.write_text(page(arguments.reports, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
