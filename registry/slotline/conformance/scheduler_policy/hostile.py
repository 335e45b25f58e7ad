"""L2 of scheduler policies: aborts, preemptions, passed over requests, numbers that return, ranks that must agree."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from slotline.conformance.scheduler_policy.queue import ARRIVALS, FORMS
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.scheduler_policy import FIRST, Traffic

CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "time_ns", "monotonic_ns", "perf_counter_ns")


def filled(run: Run, count: int = 20) -> Traffic:
    """Return traffic of the case's form, in which all wait."""
    traffic = Traffic(run)
    for index in range(count):
        ARRIVALS[run["arrivals"]](traffic, index)
    return traffic


@check(Kind.SCHEDULER_POLICY, "scheduler_policy.queue.aborted", Level.HOSTILE, cases=lambda _: FORMS, cost=0.01)
def queue_aborted(run: Run) -> None:
    """A waiting request that ends is named no more, wherever it stood, and the others are."""
    for place in (0, 7, 19):
        traffic = filled(run)
        traffic.leave(FIRST + place)
        traffic.step()
        traffic.leave(max(traffic.waiting))
        ended = {entry[1] for entry in traffic.log if isinstance(entry, tuple) and entry[0] == "left"}
        everyone = set(range(FIRST, FIRST + 20)) - ended
        traffic.drain()
        if lost := everyone - set(traffic.joined):
            raise Failed(f"requests {sorted(lost)} were lost after others had been aborted")


@check(Kind.SCHEDULER_POLICY, "scheduler_policy.queue.preempted", Level.HOSTILE, cases=lambda _: FORMS, cost=0.01)
def queue_preempted(run: Run) -> None:
    """Preempted requests wait again, several times, and are admitted again."""
    traffic = filled(run)
    for _ in range(8):
        traffic.step(steps=4)
        traffic.preempt()
        if traffic.running:
            traffic.preempt()
    traffic.drain()


@check(Kind.SCHEDULER_POLICY, "scheduler_policy.queue.passed_over", Level.HOSTILE, cases=lambda _: FORMS, cost=0.01)
def queue_passed_over(run: Run) -> None:
    """Requests that are taken out and pushed back in the same step keep their places."""
    one, other = filled(run), filled(run)
    while one.waiting:
        aside = [other.remove(other.head()) for _ in range(min(3, len(other.waiting)))]
        for view in aside:
            other.push(view)
        if (head := one.head()) != (again := other.head()):
            raise Failed(f"request {head} is first, and {again} after some were passed over")
        for traffic in (one, other):
            traffic.join(head, 1)
            traffic.leave(head)


@check(Kind.SCHEDULER_POLICY, "scheduler_policy.queue.restart", Level.HOSTILE, cases=lambda _: FORMS, cost=0.01)
def queue_restart(run: Run) -> None:
    """After `restart` the policy knows only the requests that are pushed again."""
    traffic = filled(run)
    traffic.step(steps=3)
    traffic.waiting.pop(traffic.head())  # it is unfinished no more
    traffic.restart()
    traffic.drain()
    traffic.restart()
    traffic.add(8, 4)
    traffic.drain()


@check(Kind.SCHEDULER_POLICY, "scheduler_policy.numbers.reused", Level.HOSTILE, cases=lambda _: FORMS, cost=0.01)
def numbers_reused(run: Run) -> None:
    """A number of a request that ended is another's, three times."""
    traffic = Traffic(run)
    for _ in range(3):
        for number in range(6):
            traffic.add(8 + number, 4, tenant="ab"[number % 2], number=number)
        traffic.step()
        traffic.drain()


@check(
    Kind.SCHEDULER_POLICY,
    "scheduler_policy.ranks.agree",
    Level.HOSTILE,
    needs={"ranks": True},
    cases=lambda _: FORMS,
    cost=0.01,
)
def ranks_agree(run: Run) -> None:
    """Two ranks with the same requests schedule alike, though their clocks and random numbers differ."""
    with scrambled(1):
        one = busy(run)
    with scrambled(-1):
        other = busy(run)
    if one != other:
        place = next(index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
        raise Failed(f"two ranks differ at event {place}: {one[place]} and {other[place]}")


@check(Kind.SCHEDULER_POLICY, "scheduler_policy.engines.apart", Level.HOSTILE, cases=lambda _: FORMS, cost=0.01)
def engines_apart(run: Run) -> None:
    """The policies of two engines know nothing of each other."""
    alone, one, other = filled(run), filled(run), filled(run)
    for _ in range(9):
        alone.step()
        one.step()
        other.add(1, 1)
        other.step()
    if one.log != alone.log:
        raise Failed("another engine's requests changed the order of this one's")


@check(
    Kind.SCHEDULER_POLICY,
    "scheduler_policy.loads.strange",
    Level.HOSTILE,
    cases=lambda _: FORMS,
    cost=0.01,
)
def loads_strange(run: Run) -> None:
    """Engines that are full, empty or nearly so get budgets and vetoes of the right form."""
    traffic = filled(run)
    view = traffic.waiting[traffic.head()]
    for blocks in (0, 1, 63):
        for rows, running in ((0, 4), (3, 1)):
            for waiting in (1, 10_000):
                load = traffic.load(
                    num_free_blocks=blocks, num_free_rows=rows, num_running=running, num_waiting=waiting
                )
                traffic.budget(load)
                traffic.admits(view, load)


def busy(run: Run) -> list[object]:
    """Return what happens in some steps with preemptions and aborts."""
    traffic = filled(run)
    for index in range(10):
        traffic.step(steps=3)
        if traffic.running and index % 3 == 0:
            traffic.preempt()
        if index % 4 == 1 and traffic.waiting:
            traffic.leave(max(traffic.waiting))
        ARRIVALS[run["arrivals"]](traffic, index)
    traffic.drain()
    return traffic.log


@contextmanager
def scrambled(direction: int) -> Iterator[None]:
    """Make clocks go forward or backward, and random numbers others."""
    state, ticks = random.getstate(), [0]

    def clock() -> int:
        ticks[0] += direction
        return 1_000_000 + ticks[0]

    clocks: dict[str, Any] = dict.fromkeys(CLOCKS, clock)
    random.seed(direction)
    try:
        with mock.patch.multiple(time, **clocks):
            yield
    finally:
        random.setstate(state)
