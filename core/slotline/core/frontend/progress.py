"""A progress bar for long work, on standard error, with tokens per second."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Protocol, TypeVar


class Bar(Protocol):
    """What the work reports to."""

    def advance(self, requests: int, *, tokens: int) -> None:
        """So many requests finished, and so many tokens came, since the last call."""
        ...


class _NoBar:
    def advance(self, requests: int, *, tokens: int) -> None:
        """Nothing is shown."""


class _RichBar:
    """Redrawn at most ten times a second, so that it costs a step nothing."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        self.display = Progress(*columns, console=Console(file=sys.stderr), transient=True, auto_refresh=False)
        self._task = self.display.add_task("generating", total=total, speed="")
        self._tokens, self._finished, self._start, self._drawn = 0, 0, monotonic(), 0.0

    def advance(self, requests: int, *, tokens: int) -> None:
        """Count, and redraw if it is time."""
        self._tokens += tokens
        self._finished += requests
        now = monotonic()
        if now - self._drawn < 0.1:
            return
        self._drawn = now
        speed = f"{self._tokens / max(now - self._start, 1e-9):,.0f} tokens/s"
        self.display.update(self._task, completed=self._finished, speed=speed, refresh=True)


def on_terminal() -> bool:
    """Return whether standard error is a terminal; one that is closed is none."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


T = TypeVar("T")


def counted(items: Sequence[T], label: str, *, show: bool) -> Iterable[T]:
    """The items, with a bar on standard error while they are worked on, if shown and it is a terminal."""
    if not show or not on_terminal():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description=label, console=Console(file=sys.stderr), transient=True)


@contextmanager
def progress_bar(total: int, *, enabled: bool, forced: bool = False) -> Iterator[Bar]:
    """A bar over `total` requests: shown if enabled and standard error is a terminal, or if forced."""
    if not enabled or not (forced or on_terminal()):
        yield _NoBar()
        return
    bar = _RichBar(total)
    with bar.display:
        yield bar
