"""Reading of files into the page cache, and its bar on a terminal."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from slotline.registry import read_ahead as module
from slotline.registry.read_ahead import read_ahead


class Terminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three files, of no block, of several and of a part of one."""
    monkeypatch.setattr(module, "BLOCK", 1 << 16)
    sizes = {"empty": 0, "long": 300_000, "short": 17}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    return [tmp_path / name for name in sizes]


@pytest.mark.parametrize("platform", ["linux", "other"])
def test_all_bytes_are_read_and_files_that_are_not_there_are_left_out(
    files: list[Path], platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    own = module._read
    monkeypatch.setattr(module, "_read", lambda block: read.append(own(block)) or read[-1])
    monkeypatch.setattr(sys, "platform", platform if platform == "other" else sys.platform)
    assert read_ahead([*files, files[0].parent / "absent", *files], progress=False) == 300_017
    assert sum(read) == 300_017
    assert len(read) == 6


def test_pages_of_a_block_come_without_a_copy_where_the_system_can(files: list[Path]) -> None:
    with files[1].open("rb") as opened:
        done = module._populated(opened.fileno(), 0, 1 << 16)
    assert done == (sys.platform == "linux" and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14))


def test_a_file_that_shrinks_meanwhile_is_no_error(files: list[Path]) -> None:
    descriptor = os.open(files[1], os.O_RDONLY)
    try:
        os.truncate(files[1], 10)
        assert module._read((descriptor, 1 << 16, 1 << 16)) == 1 << 16
    finally:
        os.close(descriptor)


def test_nothing_is_read_where_memory_has_no_room(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        available = 1000

    monkeypatch.setattr(module.psutil, "virtual_memory", Full)
    assert read_ahead(files, progress=False) == 0


def test_a_terminal_gets_a_bar_and_others_nothing(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read_ahead(files, progress=True)
    assert capfd.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    read_ahead(files, progress=False)
    assert terminal.getvalue() == ""
    read_ahead(files, progress=True, label="reading the weights of a test")
    assert "reading the weights of a test" in terminal.getvalue()
    assert "300.0" in terminal.getvalue()
