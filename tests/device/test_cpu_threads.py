"""The number of threads of an engine on a CPU: what may be used, what is timed, and what wins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slotline.kernels import cpu_threads
from slotline.kernels.cpu_threads import FOLDER, Choice, Cores, CpuOptions, choose, count_cores, judge, set_threads
from slotline.planner.plan import make_plan
from slotline.registry.config import load_config

HYPERTHREADS = Cores(usable=4, physical=2, seen=4)


@pytest.fixture
def auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process without OMP_NUM_THREADS on two cores with four hardware threads, and its cache folder."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_threads, "cores", lambda: HYPERTHREADS)
    torch.set_num_threads(4)
    yield tmp_path / FOLDER
    torch.set_num_threads(before)


def system(folder: Path, siblings: list[str], group: str, limits: dict[str, str]) -> Path:
    """A folder with what the system says of its processors and of this process's control group."""
    for number, text in enumerate(siblings):
        topology = folder / f"sys/devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text)
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(group)
    for name, text in limits.items():
        file = folder / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("0::/", {}, Cores(usable=4, physical=2, seen=4)),
        ("0::/", {"cpu.max": "max 100000"}, Cores(usable=4, physical=2, seen=4)),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, Cores(usable=2, physical=2, seen=4)),
        ("0::/a/b", {"a/cpu.max": "350000 100000", "a/b/cpu.max": "50000 100000"}, Cores(1, 1, 4)),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, Cores(3, 2, 4)),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, Cores(4, 2, 4)),
    ],
)
def test_what_may_be_used_is_affinity_within_the_limits_of_control_groups(
    tmp_path: Path, group: str, limits: dict[str, str], expected: Cores
) -> None:
    told = system(tmp_path, ["0-1\n", "0-1\n", "2-3\n", "2-3\n"], group + "\n", limits)
    assert count_cores(range(4), told) == expected


def test_only_the_cores_of_an_affinity_count(tmp_path: Path) -> None:
    told = system(tmp_path, ["0,2", "1,3", "0,2", "1,3"], "0::/", {})
    assert count_cores([0, 2], told) == Cores(usable=2, physical=1, seen=2)
    assert count_cores([0, 1], told) == Cores(usable=2, physical=2, seen=2)


def test_candidates_are_a_thread_for_each_core_all_and_half_of_many() -> None:
    assert HYPERTHREADS.candidates() == [2, 4]
    assert Cores(usable=2, physical=2, seen=2).candidates() == [2]
    assert Cores(usable=32, physical=16, seen=32).candidates() == [16, 32, 8]


def test_the_fastest_number_is_taken_and_a_thread_for_each_core_if_it_is_close() -> None:
    assert judge(HYPERTHREADS, {2: [1.0] * 4, 4: [0.9] * 4}).threads == 4
    assert judge(HYPERTHREADS, {2: [1.0] * 4, 4: [0.98] * 4}).threads == 2
    mixed = judge(HYPERTHREADS, {2: [0.004, 0.004, 0.004, 0.002], 4: [0.003, 0.004, 0.005, 0.002]})
    assert mixed.threads == 4  # one row counts most
    assert "4 3.00 4.00 5.00 2.00" in mixed.describe()


def test_candidates_are_timed_once_and_the_answer_is_kept(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def times(candidates: list[int]) -> dict[int, list[float]]:
        asked.append(candidates)
        return {2: [2e-3] * 4, 4: [1e-3] * 4}

    monkeypatch.setattr(cpu_threads, "times", times)
    assert set_threads(None).threads == torch.get_num_threads() == 4
    choice = choose(CpuOptions())
    assert asked == [[2, 4]]
    assert choice.describe() == (
        "threads: 4, the fastest for 4 usable processors on 2 cores; ms of 1 row, 16 rows, 128 rows, attention: "
        "2 2.00 2.00 2.00 2.00; 4 1.00 1.00 1.00 1.00"
    )
    (file,) = auto.iterdir()
    file.write_text(json.dumps({"threads": 0, "because": "broken"}))
    monkeypatch.setenv("SLOTLINE_CACHE", "/proc/no-folder")
    assert choose(CpuOptions()) == Choice(
        2, "one for each core of 4 usable processors on 2 cores: the cache folder keeps no times"
    )


def test_what_the_user_gives_wins(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "times", lambda candidates: pytest.fail("timed"))
    assert choose(CpuOptions(threads=3)) == Choice(3, "as devices.cpu.threads says")
    torch.set_num_threads(7)
    assert choose(CpuOptions()) == Choice(7, "as the program has set", left=True)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert choose(CpuOptions()) == Choice(7, "as OMP_NUM_THREADS says", left=True)
    assert choose(CpuOptions(threads=3)).threads == 3


def test_times_are_real_and_leave_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    found = cpu_threads.times([1, 2])
    assert torch.get_num_threads() == before
    assert list(found) == [1, 2]
    assert all(0 < seconds < 10 for each in found.values() for seconds in each)


def test_an_engine_has_the_number_that_its_configuration_names() -> None:
    before = torch.get_num_threads()
    try:
        loaded = load_config(overrides=("device=cpu", "devices.cpu.threads=3"))
        assert make_plan(loaded).plan.device.cores == torch.get_num_threads() == 3
        assert cpu_threads.slotline_report_header(loaded.config) == "threads: 3, as devices.cpu.threads says"
    finally:
        torch.set_num_threads(before)
    assert cpu_threads.slotline_report_header(load_config(overrides=("device=cuda",)).config) is None
