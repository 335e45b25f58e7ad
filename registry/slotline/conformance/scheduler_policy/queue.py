"""L1 of scheduler policies: every request is admitted once, and each answer is of the right form."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.scheduler_policy import Traffic

ARRIVALS: Mapping[str, Callable[[Traffic, int], object]] = {
    "equal": lambda traffic, _: traffic.add(8, 4),
    "longer and longer": lambda traffic, index: traffic.add(1 + index, 4 + index),
    "shorter and shorter": lambda traffic, index: traffic.add(90 - index, 90 - index),
    "priorities": lambda traffic, index: traffic.add(8, 4, priority=index * 7 % 5 - 2),
    "tenants": lambda traffic, index: traffic.add(8 + index, 4, tenant="abc"[index * 5 % 7 % 3]),
    "no outputs": lambda traffic, _: traffic.add(8, 0),
}
FORMS = tuple({"arrivals": name} for name in ARRIVALS)
COUNT = 40


@check(Kind.SCHEDULER_POLICY, "scheduler_policy.queue.all", Level.NUMERICS, cases=lambda _: FORMS, cost=0.01)
def queue_all(run: Run) -> None:
    """Every waiting request is named until it is admitted, and each is admitted once."""
    traffic = Traffic(run)
    for index in range(COUNT):
        ARRIVALS[run["arrivals"]](traffic, index)
    everyone = sorted(traffic.waiting)
    traffic.drain()
    joins = sorted(entry[1] for entry in traffic.log if isinstance(entry, tuple) and entry[0] == "joins")
    if joins != everyone:
        raise Failed(f"requests {everyone} arrived, and {joins} were admitted")


@check(Kind.SCHEDULER_POLICY, "scheduler_policy.queue.stream", Level.NUMERICS, cases=lambda _: FORMS, cost=0.01)
def queue_stream(run: Run) -> None:
    """Requests that arrive while others run are admitted like those before."""
    traffic = Traffic(run)
    for index in range(COUNT):
        ARRIVALS[run["arrivals"]](traffic, index)
        traffic.step(steps=3)
    traffic.drain()


@check(
    Kind.SCHEDULER_POLICY,
    "scheduler_policy.victim.runs",
    Level.NUMERICS,
    needs={"victims": True},
    cases=lambda _: FORMS,
    cost=0.01,
)
def victim_runs(run: Run) -> None:
    """The request that gives way is one that runs, and it is admitted again."""
    traffic = Traffic(run)
    for index in range(12):
        ARRIVALS[run["arrivals"]](traffic, index)
    for _ in range(6):
        traffic.step(steps=5)
        traffic.preempt()
    traffic.drain()
