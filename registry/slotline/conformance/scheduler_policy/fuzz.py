"""L3 of scheduler policies: no request starves, and none is lost in random traffic."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.scheduler_policy import MAX_MODEL_LEN, Traffic

STEPS = 300
LATER = 800
"""Requests that may arrive after one before it is admitted."""


@check(
    Kind.SCHEDULER_POLICY,
    "scheduler_policy.starvation.none",
    Level.STATEFUL,
    cases=lambda _: ({"waits": "longest"}, {"waits": "shortest"}, {"waits": "preempted"}, {"waits": "tenant"}),
    cost=0.1,
)
def starvation_none(run: Run) -> None:
    """A request is admitted after a bounded number of later arrivals of its priority, however many come."""
    traffic = Traffic(run, rows=1)
    traffic.add(8, 4)
    traffic.step(steps=2)
    longest = run["waits"] != "shortest"
    tenant = "lone" if run["waits"] == "tenant" else ""
    lone = traffic.add(MAX_MODEL_LEN // 2, MAX_MODEL_LEN // 2, tenant=tenant) if longest else traffic.add(1, 1)
    if run["waits"] == "preempted":
        while not any(one.view.number == lone.number for one in traffic.running):
            traffic.step(steps=2)
            if lone.number in traffic.joined and not traffic.running:
                return  # it ended at once
        traffic.preempt()
    for _ in range(LATER):
        traffic.add(1 if longest else MAX_MODEL_LEN // 2, 1, tenant="many" if tenant else "")
        traffic.step(steps=1)
        if lone.number not in traffic.waiting:
            return
    raise Failed(f"a request still waits after {LATER} that came later were admitted")


@check(Kind.SCHEDULER_POLICY, "scheduler_policy.fuzz.traffic", Level.STATEFUL, explores=True, cost=0.2)
def fuzz_traffic(run: Run) -> None:
    """Random arrivals, preemptions, aborts and restarts: each request is admitted or ends, and none is lost."""
    rng = run.rng
    for _ in range(4):
        traffic = Traffic(run, rows=rng.randint(1, 6))
        ended, added = set[int](), set[int]()
        for _ in range(STEPS // 4):
            for _ in range(rng.randint(0, 3)):
                prompt = rng.randint(1, 200)
                made = traffic.add(
                    prompt, rng.randint(0, 200), priority=rng.randint(-2, 2), tenant=rng.choice(("", "a", "b", "c"))
                )
                added.add(made.number)
            event = rng.random()
            if event < 0.2 and traffic.running:
                traffic.preempt()
            elif event < 0.35 and traffic.waiting:
                number = rng.choice(sorted(traffic.waiting))
                traffic.leave(number)
                ended.add(number)
            elif event < 0.38:
                traffic.restart()
            traffic.step(steps=rng.randint(1, 4))
        traffic.drain()
        if lost := added - ended - set(traffic.joined):
            raise Failed(f"requests {sorted(lost)[:20]} were never admitted")
