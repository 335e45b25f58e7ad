"""What a check makes ends with it: stores, threads and memory do not pile up over a run of the suite."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from attrs import evolve

from slotline.plugins.kv_connectors.stores.background import Background
from slotline.testing import Level, Outcome, check_plugin
from slotline.testing.reference import scheduler_policy
from slotline.testing.runner import Record
from slotline.testing.subject import Subject

pytestmark = pytest.mark.behaviour(96)


class Ring(scheduler_policy.Careful):
    """A plugin that only the garbage collector ends, as one whose surroundings lead back to it."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.itself = self


def test_a_plugin_in_a_ring_of_objects_ends_with_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    built = list[Any]()
    build = Subject.build
    monkeypatch.setattr(Subject, "build", lambda subject, context: _noted(built, build(subject, context)))
    alive = dict[str, int]()

    def ended(record: Record) -> None:
        alive[record.key] = sum(one() is not None for one in built)

    check_plugin(evolve(scheduler_policy.descriptor, factory=Ring), level=Level.NUMERICS, on_record=ended)
    assert len(built) > 10
    assert {key: count for key, count in alive.items() if count} == {}
    assert gc.get_freeze_count() == 0


def _noted(built: list[Any], made: Any) -> Any:
    built.append(ref(made))
    return made


def test_stores_in_shared_memory_end_with_the_check_that_made_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build, most = Subject.build, list[int]()

    def counted(subject: Subject, context: Any) -> Any:
        made = build(subject, context)
        most.append(len(list(tmp_path.glob("*.users"))))  # a store has one
        return made

    def ended(record: Record) -> None:
        assert list(tmp_path.iterdir()) == [], f"{record.key} leaves a store"

    monkeypatch.setattr(Subject, "build", counted)
    records = check_plugin(
        "kv_connector:shared",
        options={"memory": "256KiB", "folder": str(tmp_path)},
        level=Level.HOSTILE,
        only=lambda item: item.cost <= 0.02,
        on_record=ended,
    )
    assert sum(record.outcome is Outcome.PASSED for record in records) > 10
    assert len(most) > 10
    assert 1 <= max(most) <= 3  # of one check


def test_threads_keep_nobody_whose_results_are_not_asked_for() -> None:
    owner = Owner()
    owner.background.submit("work", lambda: None, owner.done)
    latest = time.monotonic() + 10
    while owner.background._results.empty() and time.monotonic() < latest:
        time.sleep(0.001)
    assert owner.background.under_way == 1
    left, threads = ref(owner), owner.background.stop.peek()[2][1]
    del owner
    gc.collect()  # it leads to itself by `done`
    assert left() is None
    assert not any(thread.is_alive() for thread in threads)


class Owner:
    """Has work done in a thread."""

    def __init__(self) -> None:
        self.background = Background({"work": 1})

    def done(self, _result: Any) -> None:
        """Take a result."""
