"""Meetings of replicas before forward passes that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Any

import pytest
from attrs import frozen

from slotline.ranks.replicas.meetings import Meetings, Pass, join_meetings
from slotline.registry.errors import RankError
from slotline.registry.ranks import Place, RankLayout


def two(timeout: float = 10.0) -> tuple[Meetings, Meetings]:
    first, second = Pipe()
    return Meetings(0, {1: first}, timeout), Meetings(1, {0: second}, timeout)


def tokens(meetings: Meetings, own: int) -> list[int]:
    """Return the tokens of each replica in the next forward pass."""
    return [one.tokens for one in meetings.meet(own)]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(10) for one in [pool.submit(call) for call in calls]]


def test_all_learn_the_tokens_of_all_and_one_without_work_is_called_first() -> None:
    first, second = two()
    called = threading.Event()
    second.called = called.set

    def idle() -> list[int]:
        assert called.wait(10)
        assert second.is_awaited
        return tokens(second, 0)

    assert at_once(lambda: tokens(first, 7), idle) == [[7, 0], [7, 0]]
    assert not first.is_awaited
    assert not second.is_awaited
    found = at_once(lambda: first.meet(1, 4), lambda: second.meet(2))
    assert found == [(Pass(2, 1, 4), Pass(2, 2))] * 2
    assert first.passes == second.passes == 2


def test_a_replica_that_does_not_come_is_named() -> None:
    first, second = two(0.05)
    with pytest.raises(RankError, match=r"replica 1 did not join forward pass 1 within 0.05 s"):
        first.meet(3)
    second.passes = 4
    first.close()
    second.close()


def test_another_pass_is_an_error() -> None:
    first, second = two()
    second.passes = 4
    with pytest.raises(RankError, match="replica 1 is in forward pass 5 and not in 1"):
        at_once(lambda: first.meet(1), lambda: second.meet(1))


@frozen
class Group:
    """What three threads gather."""

    place: Place
    given: list[Any]
    barrier: threading.Barrier

    def gather(self, value: Any) -> list[Any]:
        self.given[self.place.rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


def test_replicas_connect_with_each_other_and_may_leave_for_another_group() -> None:
    for size in (3, 2):
        layout, given, barrier = RankLayout(data=size), [None] * size, threading.Barrier(size, timeout=10)
        groups = [Group(Place(rank=rank, layout=layout), given, barrier) for rank in range(size)]
        joined = at_once(*(lambda group=group: join_meetings(group, 10.0) for group in groups))
        calls = [lambda one=one: tokens(one, one.number) for one in joined]
        assert at_once(*calls) == [list(range(size))] * size
        for one in joined:
            one.close()
