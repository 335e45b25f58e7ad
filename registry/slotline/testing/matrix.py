"""Support table: checks against plugins, made only of reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from attrs import define, field, frozen

from slotline.testing.check import Family, Level
from slotline.testing.report import Report
from slotline.testing.runner import Outcome, Record

PASSED, PARTLY, FAILED, NOT_DECLARED, NOT_RUN = "✅", "⚠️", "❌", "-", "·"
LEGEND = (
    f"{PASSED} passed, {PARTLY} expected to fail, or fails and does not count yet, {FAILED} failed, "
    f"{NOT_DECLARED} not declared or not applicable, {NOT_RUN} not run"
)
_LONGEST_NOTE = 160


@frozen
class Cell:
    """Result of a plugin in one check.

    Attributes:
        symbol: one of the symbols above.
        count: ``passed/run`` of its cases, empty if nothing ran.
        note: the number of its footnote, or None.
    """

    symbol: str
    count: str = ""
    note: int | None = None


@frozen
class Row:
    """Row of one check, with its cells in the order of the columns."""

    id: str
    summary: str
    profile: str
    cells: tuple[Cell, ...]


@frozen
class Section:
    """Checks of one level."""

    title: str
    rows: tuple[Row, ...]


@frozen
class Table:
    """Table of one kind.

    Attributes:
        kind: kind of the plugins.
        columns: a heading for each report.
        facts: rows of texts above the checks: a title, and a text for each column.
        sections: the checks by level.
        notes: the footnotes, numbered from 1.
    """

    kind: str
    columns: tuple[str, ...]
    facts: tuple[tuple[str, tuple[str, ...]], ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]


@define
class _Notes:
    """Footnotes without repetition."""

    texts: list[str] = field(factory=list)

    def number(self, text: str) -> int | None:
        """Return the number of a footnote, None for an empty text."""
        first = text.splitlines()[0] if text else ""
        short = first if len(first) <= _LONGEST_NOTE else first[: _LONGEST_NOTE - 1] + "…"
        if not short:
            return None
        if short not in self.texts:
            self.texts.append(short)
        return self.texts.index(short) + 1


def tables(reports: Iterable[Report]) -> tuple[Table, ...]:
    """Return a table for each kind, in order of appearance, with columns in the order of the reports."""
    kinds: dict[str, list[Report]] = {}
    for report in reports:
        kinds.setdefault(report.plugin.kind, []).append(report)
    return tuple(_table(kind, group) for kind, group in kinds.items())


def _table(kind: str, reports: Sequence[Report]) -> Table:
    notes = _Notes()
    checks = {record.id: record for report in reports for record in report.records}
    ordered = sorted(checks.values(), key=lambda record: (record.level, record.profile, record.id))
    sections = []
    for level in Level:
        rows = [_row(record, reports, notes) for record in ordered if record.level is level]
        if rows:
            sections.append(Section(level.title, tuple(rows)))
    return Table(kind, _headings(reports), _facts(reports), tuple(sections), tuple(notes.texts))


def _headings(reports: Sequence[Report]) -> tuple[str, ...]:
    names = Counter(report.plugin.name for report in reports)
    return tuple(
        f"{r.plugin.name} ({r.machine.device})" if names[r.plugin.name] > 1 else r.plugin.name for r in reports
    )


def _facts(reports: Sequence[Report]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return (
        ("level reached", tuple("none" if r.level_reached is None else str(r.level_reached) for r in reports)),
        ("conformant", tuple(_conformant(report) for report in reports)),
        ("from", tuple(report.plugin.source for report in reports)),
        ("contract", tuple(str(report.plugin.contract) for report in reports)),
        ("device", tuple(str(report.machine) for report in reports)),
        ("suite", tuple(report.suite.version for report in reports)),
        ("digest", tuple(report.digest for report in reports)),
    )


def _conformant(report: Report) -> str:
    if report.conformant:
        return f"up to {report.settings.level}"
    return "no" if report.complete else "unknown: a part of the checks ran"


def _row(check: Record, reports: Sequence[Report], notes: _Notes) -> Row:
    own = ([record for record in report.records if record.id == check.id] for report in reports)
    return Row(check.id, check.summary, check.profile, tuple(_cell(records, notes) for records in own))


def _cell(records: Sequence[Record], notes: _Notes) -> Cell:
    passed = sum(record.outcome is Outcome.PASSED for record in records)
    ran = [record for record in records if record.outcome not in (Outcome.SKIPPED, Outcome.DISABLED)]
    count = f"{passed}/{len(ran)}" if ran else ""
    for symbol, against in (
        (FAILED, [r for r in records if r.bad]),
        (PARTLY, [r for r in records if r.outcome in (Outcome.XFAILED, Outcome.DISABLED)]),
        (PARTLY, [r for r in ran if r.outcome is Outcome.FAILED and r.family is not Family.UNDERDECLARED]),
    ):
        if against:
            return Cell(symbol, count, notes.number(against[0].reason))
    if passed and ran[0].family is Family.UNDERDECLARED:
        return Cell(PASSED, count, notes.number("works, though it is not declared"))
    if passed:
        return Cell(PASSED, count)
    if not records:
        return Cell(NOT_RUN)
    told = records[0].family is Family.DECLARED  # for the others it only states the declaration
    return Cell(NOT_DECLARED, count, notes.number(records[0].reason) if told else None)


def to_markdown(found: Iterable[Table]) -> str:
    """Return the tables as GitHub's Markdown."""
    return "\n".join(_markdown(table) for table in found) + f"\n{LEGEND}.\n"


def _markdown(table: Table) -> str:
    lines = [f"### {table.kind}", "", _line(["check", "profile", *table.columns])]
    lines.append(_line(["---", "---", *[":-:" for _ in table.columns]]))
    lines += [_line([title, "", *texts]) for title, texts in table.facts]
    for section in table.sections:
        lines.append(_line([f"**{section.title}**", "", *["" for _ in table.columns]]))
        lines += [_line([f"`{row.id}`", row.profile, *map(_symbol, row.cells)]) for row in section.rows]
    notes = [f"{number}. {text}" for number, text in enumerate(table.notes, 1)]
    return "\n".join([*lines, "", *notes, ""])


def _symbol(cell: Cell) -> str:
    return cell.symbol if cell.note is None else f"{cell.symbol} <sup>{cell.note}</sup>"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def to_html(found: Iterable[Table]) -> str:
    """Return the tables as one self-contained page."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("slotline.testing", "templates")
    page = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template("matrix.html")
    return str(page.render(tables=tuple(found), legend=LEGEND))
