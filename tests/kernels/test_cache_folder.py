"""Files of the cache folder: written at once, and nothing stays of a process that was killed while it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slotline.registry.cache_folder import remove_stale, write_atomic

WRITER = """
import os, sys, time
from pathlib import Path
from slotline.registry.cache_folder import write_atomic
def stop(self, target):
    print("writing", flush=True)
    time.sleep(60)
Path.replace = stop
write_atomic(Path(sys.argv[1]), b"half")
"""


def start_writer(file: Path) -> subprocess.Popen[str]:
    """Start a process that stops in the middle of writing a file."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, file], env=environment, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    return writer


def test_what_a_killed_process_left_is_removed_and_what_a_running_one_writes_is_not(tmp_path: Path) -> None:
    killed, running = start_writer(tmp_path / "a.json"), start_writer(tmp_path / "b.json")
    try:
        killed.kill()
        killed.wait()
        assert len(list(tmp_path.iterdir())) == 2
        for scratch in tmp_path.iterdir():
            os.utime(scratch, (0, 0))
        write_atomic(tmp_path / "c.json", b"whole")
        left = sorted(path.name for path in tmp_path.iterdir())
        assert len(left) == 2
        assert left[0].startswith("b.json.scratch-")
        assert (tmp_path / "c.json").read_bytes() == b"whole"
    finally:
        for writer in (killed, running):
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    remove_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize(
    ("name", "hours", "stays"),
    [
        ("f.json.scratch-otherhost-1-1", 1, True),
        ("f.json.scratch-otherhost-1-1", 25, False),
        (f"f.{2**22 + 1}.140000", 2, False),
        (f"f.{2**22 + 1}.140000", 0.1, True),
        ("f.{own}.140000", 1000, True),
        ("f.json", 1000, True),
        ("kernel.v2.cubin", 1000, True),
        ("f.tmp", 1000, True),
    ],
)
def test_only_scratch_files_go_and_those_of_elsewhere_after_a_day(
    tmp_path: Path, name: str, hours: float, stays: bool
) -> None:
    file = tmp_path / name.format(own=os.getpid())
    file.write_bytes(b"x")
    when = time.time() - 3600 * hours
    os.utime(file, (when, when))
    write_atomic(tmp_path / "new.json", b"y")
    assert file.exists() == stays


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "f.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomic(tmp_path / "f.json", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]


def test_writers_of_one_file_at_a_time_leave_one_whole_file(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=write_atomic, args=(tmp_path / "f.json", content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]
    assert (tmp_path / "f.json").read_bytes() in contents
