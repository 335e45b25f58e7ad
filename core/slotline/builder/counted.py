"""A progress bar on standard error for items that are counted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def on_terminal() -> bool:
    """Return True if standard error is an open terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def counted(items: Sequence[T], label: str, *, show: bool) -> Iterable[T]:
    """Return the items. Iterating shows a bar on standard error if `show` is set and it is a terminal."""
    if not show or not on_terminal():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description=label, console=Console(file=sys.stderr), transient=True)
