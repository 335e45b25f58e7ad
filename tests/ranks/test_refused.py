"""What cannot run over several ranks is refused, by name and with a remedy, before or while ranks meet."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from attrs import evolve
from cli_cases import pretend_project_installed
from repository import TESTS
from torch import distributed
from torch.distributed import HashStore

from slotline.builder.communicators import compare
from slotline.core import LLM
from slotline.planner.plan import Planned, make_plan
from slotline.ranks.group import RankGroup, join_launched, launched_place
from slotline.ranks.launch import start_others
from slotline.ranks.links import Link, Links
from slotline.registry.config import load_config
from slotline.registry.errors import ConfigError, NegotiationError, RankError
from slotline.registry.ranks import Place, RankLayout

TWO = Place(layout=RankLayout(tensor=2))
THREE = Place(layout=RankLayout(tensor=3))


def torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, port: int) -> None:
    """Make this process look like one of torchrun's."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


def refused(kind: type[Exception], text: str, **settings: Any) -> str:
    """What an engine says that is not built. No process is left."""
    before = psutil.Process().children()
    with pytest.raises(kind, match=text) as caught:
        LLM(**settings)
    assert psutil.Process().children() == before
    return str(caught.value)


def test_sizes_that_do_not_divide_are_named() -> None:
    said = refused(NegotiationError, "parallel.tensor = 3", tensor=3)
    assert "heads" in said


def test_more_ranks_than_devices_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_device"]:
        monkeypatch.delitem(sys.modules, name)
    pretend_project_installed(monkeypatch, tmp_path / "site", TESTS / "third_party" / "acme-device")
    loaded = load_config(values={"device": "acme", "parallel.tensor": 4})
    with pytest.raises(ConfigError, match=r"rank 2 would be on .*acme device 2, and there are 2: 4 ranks") as caught:
        make_plan(loaded, place=Place(rank=2, local_rank=2, layout=RankLayout(tensor=4)))
    assert "start ranks on more machines with torchrun" in str(caught.value)
    with pytest.raises(ConfigError, match="names one device"):
        make_plan(load_config(values={"device": "acme:1", "parallel.tensor": 2}), place=TWO)


def test_another_number_of_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, 0, 4, 1)
    refused(ConfigError, r"4 processes were started for 2 ranks \(tensor 2\)", tensor=2)
    assert launched_place(RankLayout(tensor=4)) is not None


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        torchrun(monkeypatch, 0, 2, taken.getsockname()[1])
        with pytest.raises(RankError, match="rank 0 of 2 cannot join the others") as caught:
            join_launched(TWO, 2.0)
    assert "a free MASTER_PORT" in str(caught.value)


def test_a_build_of_torch_without_gloo_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    refused(ConfigError, "torch.distributed with gloo", tensor=2)


def test_a_process_group_of_the_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    refused(ConfigError, "already has a process group", tensor=2)


class Mine:
    """A class that other processes cannot import, as one of a script."""


Mine.__module__ = "__main__"


def test_a_configuration_that_cannot_be_sent_is_named() -> None:
    loaded = evolve(load_config(values={"parallel.tensor": 2}), tree={"mine": Mine()})
    with pytest.raises(ConfigError, match=r"cannot be sent to other processes: .*Mine is defined in"):
        start_others(TWO, loaded, 5.0)


@pytest.fixture(scope="module")
def planned() -> Planned:
    return make_plan(load_config(values={"parallel.tensor": 2}), place=TWO)


class Ranks:
    """Two ranks, of which the second has another value for one key."""

    def __init__(self, what: str, value: str | None) -> None:
        self.place, self.communicators, self._what, self._value = TWO, [], what, value  # type: ignore[var-annotated]

    def gather(self, value: dict[str, str]) -> list[dict[str, str]]:
        other = {name: said for name, said in value.items() if not (name == self._what and self._value is None)}
        return [value, other if self._value is None else {**other, self._what: self._value}]


@pytest.mark.parametrize(
    ("what", "value", "text"),
    [
        ("torch", "2.0.0", "rank 1 differs from rank 0: torch is 2.0.0 on rank 1"),
        ("slotline", "9.9", "rank 1 differs from rank 0: slotline is 9.9 on rank 1"),
        ("the plan", "abcdef", "rank 1 differs from rank 0: the plan is abcdef on rank 1"),
        ("file 'model.safetensors'", "7 bytes, 00", "file 'model.safetensors' is 7 bytes, 00 on rank 1"),
        ("file 'config.json'", None, "file 'config.json' is missing on rank 1"),
    ],
)
def test_ranks_with_other_versions_plans_or_files_are_named(
    what: str, value: str | None, text: str, planned: Planned
) -> None:
    with pytest.raises(RankError) as caught:
        compare(Ranks(what, value), planned)
    assert text in caught.value.message
    assert caught.value.fix == "give all ranks the same files, packages and configuration"


def test_a_rank_that_ends_or_is_late_before_it_connects_is_named() -> None:
    links = Links(HashStore(), TWO, 1.0, 0.2)
    with pytest.raises(RankError, match=r"ranks \[1\] did not start within 0.2 s") as caught:
        links.accept(lambda: None)
    assert caught.value.rank == 1
    links = Links(HashStore(), TWO, 1.0, 60.0)
    with pytest.raises(RankError, match="rank 1 has ended: exit code 3"):
        links.accept(lambda: "rank 1 has ended: exit code 3")
    links.close()


class Waiting(RankGroup):
    """A group in which this thread waits for another rank until the test is over."""

    def gather(self, value: Any) -> list[Any]:
        value.wait(30)
        return []


@pytest.fixture
def linked() -> Iterator[tuple[Links, Link, Link]]:
    """Three ranks in one process, whose engines are built."""
    store, found = HashStore(), list[Link]()
    links = Links(store, THREE, 0.6, 60.0)
    connecting = threading.Thread(target=lambda: found.extend(Link(store, rank, lambda: None) for rank in (1, 2)))
    connecting.start()
    links.accept(lambda: None)
    connecting.join()
    links.watch.building = False
    yield links, found[0], found[1]
    for link in found:
        link.close()
    links.close()


@pytest.mark.spread(2)
@pytest.mark.parametrize("hanging", [0, 1, 2])
def test_the_rank_that_the_others_wait_for_is_named(hanging: int, linked: tuple[Links, Link, Link]) -> None:
    links, *others = linked
    over, group = threading.Event(), Waiting(THREE, HashStore(), owner=False)

    def step(rank: Any, waits: bool) -> None:
        rank.group = group
        rank.begin_step()
        if waits:
            group.gather(over)
        else:
            over.wait(30)  # where it hangs

    threads = [
        threading.Thread(target=step, args=(rank, number != hanging))
        for number, rank in enumerate((links.watch, *others))
    ]
    for thread in threads:
        thread.start()
    error = links.error(10.0)
    over.set()
    for thread in threads:
        thread.join()
    assert error.rank == hanging
    assert error.message == f"rank {hanging} failed in step 1: it hangs, and the others have waited for 0.6 s"
    assert "# where it hangs" in error.details
    assert "parallel.timeout" in str(error.fix)


def test_the_first_cause_is_named_and_not_what_it_caused(linked: tuple[Links, Link, Link]) -> None:
    links, first, second = linked
    links.watch.begin_step()
    first.begin_step()
    first.failed(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    second.step = 1
    second.failed(ValueError("the cause"))
    error = links.error(10.0)
    assert error.message == "rank 2 failed in step 1: it raised ValueError: the cause"
    until = time.monotonic() + 5
    while not (first.failure and second.failure) and time.monotonic() < until:
        time.sleep(0.01)
    assert first.failure == second.failure == error.message


def test_an_error_that_every_rank_raises_is_none_of_the_ranks(linked: tuple[Links, Link, Link]) -> None:
    links, first, second = linked
    links.watch.begin_step()
    for link in (first, second):
        link.begin_step()
        link.raised(ValueError("of all"))
    assert links.watch.all_raised()
    links.watch.end_step()
    assert not links.failed.wait(0.7)
    links.close()  # which is no failure either
    until = time.monotonic() + 5
    while not first.failure and time.monotonic() < until:
        time.sleep(0.01)
    assert first.failure == "rank 0 has closed the engine"
