"""Output of `slotline conform`: progress while it runs, and the report in words."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from slotline.testing.report import Report
    from slotline.testing.stream import Reader

_STYLES = {"good": "bold green", "bad": "red", "odd": "yellow", "head": "bold"}


@contextmanager
def progress() -> Iterator[Callable[[Reader], None]]:
    """Show on standard error how far each level is: bars on a terminal, else a line for each level that is done."""
    if not sys.stderr.isatty():
        yield _Lines().update
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[now]}"), console=Console(stderr=True), transient=True) as bars:
        yield _Bars(bars).update


class _Lines:
    def __init__(self) -> None:
        self._told: set[Any] = set()

    def update(self, reader: Reader) -> None:
        done = Counter(record.level for record in reader.records)
        for level, planned in sorted(reader.planned.items()):
            if done[level] >= planned and level not in self._told:
                self._told.add(level)
                bad = sum(record.bad for record in reader.records if record.level is level)
                note = f", {bad} against the plugin" if bad else ""
                print(f"{level.title:<14} {planned} of {planned} runs{note}", file=sys.stderr)


class _Bars:
    def __init__(self, bars: Any) -> None:
        self._bars, self._tasks = bars, dict[Any, Any]()

    def update(self, reader: Reader) -> None:
        done = Counter(record.level for record in reader.records)
        for level, planned in sorted(reader.planned.items()):
            if level not in self._tasks:
                self._tasks[level] = self._bars.add_task(f"{level.title:<14}", total=planned, now="")
            running = reader.running
            now = running.key if running is not None and running.level is level else ""
            self._bars.update(self._tasks[level], completed=done[level], now=now)


def show(report: Report, *, tracebacks: bool) -> None:
    """Print the report on standard output."""
    from slotline.testing.summary import Line, headline, summary

    lines = [Line(headline(report), "head"), Line(""), *summary(report, tracebacks=tracebacks)]
    if not sys.stdout.isatty():
        print("\n".join(line.text for line in lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    for line in lines:
        console.print(Text(line.text, style=_STYLES.get(line.tone, "")))
