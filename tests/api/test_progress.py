"""Progress bars: on a terminal, or where they are asked for, and nowhere else."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from slotline.builder import counted as progress
from slotline.builder.counted import counted
from slotline.llm import progress as bars
from slotline.llm.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error as a terminal, which keeps what is drawn."""
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    made = Terminal()
    for module in (progress, bars):  # pytest changes the real one between phases
        monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=made))
    return made


def test_captures_and_trials_are_counted_on_a_terminal(terminal: Terminal) -> None:
    assert list(counted([3, 2, 1], "capturing graphs", show=True)) == [3, 2, 1]
    shown = terminal.getvalue()
    assert "capturing graphs" in shown
    assert "100%" in shown


def test_nothing_is_drawn_where_nobody_looks(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted([3, 2, 1], "capturing graphs", show=False) == [3, 2, 1]
    assert terminal.getvalue() == ""
    file = io.StringIO()
    for module in (progress, bars):
        monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=file))
    assert counted([3, 2, 1], "capturing graphs", show=True) == [3, 2, 1]
    with progress_bar(2, enabled=True) as bar:
        bar.advance(2, tokens=5)
    assert file.getvalue() == ""


def test_generated_requests_and_tokens_are_shown(terminal: Terminal) -> None:
    with progress_bar(4, enabled=True) as bar:
        bar.advance(3, tokens=600)
    shown = terminal.getvalue()
    assert "generating" in shown
    assert "3/4" in shown
    assert "tokens/s" in shown
