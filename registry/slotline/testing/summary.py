"""Report as text for terminals: counts by level, failures, then skipped checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from attrs import frozen

from slotline.testing.check import Family, Level
from slotline.testing.keys import case_text
from slotline.testing.report import Report
from slotline.testing.runner import Outcome, Record

_MOST_CASES = 6  # cases of a check that are named
_COLUMNS = ("passed", "failed", "expected", "noted", "skipped", "off")


@frozen
class Line:
    """Line of text and its style: ``good``, ``bad``, ``odd``, ``head`` or plain."""

    text: str
    tone: str = ""


def headline(report: Report) -> str:
    """Return the plugin under test and the machine."""
    plugin = report.plugin
    return f"{plugin.label} ({plugin.source}), contract {plugin.contract}, on {report.machine}"


def verdict(report: Report) -> Line:
    """Return the final verdict on the run."""
    asked, reached = report.settings.level, report.level_reached
    if report.settings.checks:
        text = "passed" if report.clean else "not passed"
        return Line(f"{text}; a part of the checks ran, so no level is shown", "good" if report.clean else "bad")
    if not report.complete:
        missing = report.planned - len(report.records)
        return Line(f"not conformant: {missing} of {report.planned} runs are missing", "bad")
    if not report.records:
        return Line("not conformant: there are no checks", "bad")
    shown = "no level is reached" if reached is None else f"level reached: {reached.title}"
    if report.conformant:
        return Line(f"conformant up to {_up_to(report)}", "good")
    return Line(f"not conformant up to {asked}: {_against(report)}; {shown}", "bad")


def _up_to(report: Report) -> str:
    """Return how far a conformant plugin was checked, and why no further."""
    asked, reached = report.settings.level, report.level_reached
    if reached is None or reached >= asked:
        return f"{asked}; level reached: {asked.title}"
    above = [record for record in report.records if record.level > reached]
    if not above:
        return f"{reached}; level reached: {reached.title}, the last one with checks of its kind"
    reasons = Counter(_skip(record) for record in above if record.outcome is Outcome.SKIPPED)
    why = f": {reasons.most_common(1)[0][0]}" if reasons else ""
    return f"{reached}; level reached: {reached.title}; nothing above it could run{why}"


def summary(report: Report, *, tracebacks: bool = False) -> Iterator[Line]:
    """Yield the whole text.

    Args:
        report: the run.
        tracebacks: True to print the traceback below each failure.
    """
    yield from _table(report)
    bad = report.failures
    if bad:
        yield Line("")
        yield Line(f"against the plugin: {len(bad)}", "head")
        for group in _by_check(bad):
            yield from _failure(group, tracebacks)
    yield from _notes(report)
    yield from _skips(report)
    yield Line("")
    yield verdict(report)


def _table(report: Report) -> Iterator[Line]:
    yield Line(f"{'level':<14}" + "".join(f"{name:>10}" for name in _COLUMNS), "head")
    for level in sorted({record.level for record in report.records}):
        counts = report.counts(level)
        failed = sum(record.bad for record in report.failures if record.level is level)
        noted = counts[Outcome.FAILED] + counts[Outcome.XPASSED] - failed
        cells = (
            counts[Outcome.PASSED],
            failed,
            counts[Outcome.XFAILED],
            noted,
            counts[Outcome.SKIPPED],
            counts[Outcome.DISABLED],
        )
        tone = "bad" if failed else "odd" if cells[2] or cells[5] else ""
        yield Line(f"{level.title:<14}" + "".join(f"{number:>10}" for number in cells), tone)


def _against(report: Report) -> str:
    counted = [record for record in report.records if record.mandatory]
    words = {"failed": len(report.failures)}
    words["expected to fail"] = sum(record.outcome is Outcome.XFAILED for record in counted)
    words["switched off"] = sum(record.outcome is Outcome.DISABLED for record in counted)
    return ", ".join(f"{number} {word}" for word, number in words.items() if number) or "nothing could be shown"


def _failure(group: list[Record], tracebacks: bool) -> Iterator[Line]:
    """Yield the first of a check's failures, and the number of further ones."""
    record = group[0]
    yield Line(f"  {record.level} {record.key}", "bad")
    yield Line(f"     {record.summary}")
    for text in record.reason.splitlines():
        yield Line(f"     {text}")
    if record.reproducer:
        yield Line(f"     {record.reproducer}")
    if tracebacks:
        for text in str(record.details.get("traceback", "")).splitlines():
            yield Line(f"       {text}")
    if len(group) > 1:
        more = " ".join(f"[{case_text(other.case)}]" for other in group[1:_MOST_CASES])
        yield Line(f"     and {len(group) - 1} more: {more}{' ...' if len(group) > _MOST_CASES else ''}")


def _notes(report: Report) -> Iterator[Line]:
    """Yield expected failures, checks that do not count, and features that work although they are not declared."""
    expected = [record for record in report.records if record.outcome is Outcome.XFAILED]
    yield from _list("expected failures", [_note(group, group[0].reason) for group in _by_check(expected)])
    loose = [r for r in report.records if not r.mandatory and r.outcome is Outcome.FAILED and _counts_some_day(r)]
    yield from _list("failed, but does not count yet", [_note(g, _first(g[0].reason)) for g in _by_check(loose)])
    more = [r for r in report.records if r.family is Family.UNDERDECLARED and r.outcome is Outcome.PASSED]
    yield from _list("works, though it is not declared", [_note(group, group[0].summary) for group in _by_check(more)])
    used = {record.reason for record in (*expected, *report.failures)}
    idle = [item for item in report.expected if report.complete and not any(str(item) in reason for reason in used)]
    yield from _list("expectations that met nothing", [f"{item.id}: {item}" for item in idle])


def _note(group: list[Record], text: str) -> str:
    name = group[0].key if len(group) == 1 else f"{group[0].id} ({len(group)} cases)"
    return f"{group[0].level} {name}: {text}"


def _by_check(records: Iterable[Record]) -> Iterable[list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.id, []).append(record)
    return groups.values()


def _skips(report: Report) -> Iterator[Line]:
    reasons: dict[str, list[Level]] = {}
    for record in report.records:
        if record.outcome in (Outcome.SKIPPED, Outcome.DISABLED):
            reasons.setdefault(_skip(record), []).append(record.level)
    rows = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    yield from _list("skipped", [f"{len(levels):>3} x {reason}" for reason, levels in rows])


def _skip(record: Record) -> str:
    """Return the reason in one line, without the details of a declaration for refusal and note checks."""
    text = _first(record.reason)
    return text if record.family is Family.DECLARED else text.partition(":")[0]


def _counts_some_day(record: Record) -> bool:
    return record.family is not Family.UNDERDECLARED


def _list(title: str, rows: list[str]) -> Iterator[Line]:
    if rows:
        yield Line("")
        yield Line(title, "head")
        yield from (Line(f"  {row}") for row in rows)


def _first(text: str) -> str:
    return text.splitlines()[0] if text else ""
