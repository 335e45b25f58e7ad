"""A progress bar for long work, on standard error, with tokens per second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Protocol, TypeAlias

from slotline.builder.counted import on_terminal
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

Progress: TypeAlias = bool | Callable[..., Any] | None
"""Choice of showing a bar, or a function that makes one, as `tqdm.tqdm` does. None follows the configuration."""


def as_progress(progress: bool | None, use_tqdm: Progress) -> Progress:
    """Return the call's choice of a progress bar, by its own option or by vLLM's.

    Raises:
        RequestError: for another value, or if both are given.
    """
    if progress is not None and use_tqdm is not None:
        raise RequestError(f"progress={safe_repr(progress)} and use_tqdm={safe_repr(use_tqdm)}", fix="give one of them")
    if not (progress is None or isinstance(progress, bool)):
        raise RequestError(f"progress={safe_repr(progress)} is not allowed", fix="progress must be True, False or None")
    if not (use_tqdm is None or isinstance(use_tqdm, bool) or callable(use_tqdm)):
        raise RequestError(
            f"use_tqdm={safe_repr(use_tqdm)} is not allowed", fix="use_tqdm must be True, False, or a class like tqdm"
        )
    return use_tqdm if progress is None else progress


class Bar(Protocol):
    """Receiver of progress reports."""

    def advance(self, requests: int, *, tokens: int) -> None:
        """Count requests that finished and tokens that were generated since the last call."""
        ...


class _NoBar:
    def advance(self, requests: int, *, tokens: int) -> None:
        """Show nothing."""


class _RichBar:
    """Progress bar redrawn at most ten times a second, so that it costs a step nothing."""

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


class _TqdmBar:
    """Progress bar of the caller's, made and updated as in vLLM."""

    def __init__(self, make: Callable[..., Any], total: int) -> None:
        self.display = make(total=total, desc="Processed prompts", dynamic_ncols=True)

    def advance(self, requests: int, *, tokens: int) -> None:
        """Count finished requests."""
        if requests:
            self.display.update(requests)


@contextmanager
def progress_bar(total: int, *, enabled: bool, asked: Progress = None) -> Iterator[Bar]:
    """Show a bar over `total` requests if the call asks for it. Default: if enabled, on a terminal."""
    if asked is not None and not isinstance(asked, bool):
        own = _TqdmBar(asked, total)
        try:
            yield own
        finally:
            own.display.close()
    elif asked or (asked is None and enabled and on_terminal()):
        bar = _RichBar(total)
        with bar.display:
            yield bar
    else:
        yield _NoBar()
