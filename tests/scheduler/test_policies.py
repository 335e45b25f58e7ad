"""Scheduler policies over rows and cache, without a model: the shipped ones, and what a policy may restrain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from attrs import evolve
from core_cases import Bench, request

from slotline.core.batch.request import Request, Status
from slotline.plugins.schedulers.descriptors import fair, fcfs, priority, shortest
from slotline.plugins.schedulers.fair import Fair, FairOptions
from slotline.plugins.schedulers.ranked import ShortestOptions
from slotline.registry.capability import Flag
from slotline.registry.contracts import (
    PolicyLoad,
    PolicyRequest,
    SchedulerPolicyCapabilities,
    SchedulerPolicyContext,
    StepBudget,
)
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import ContractError, IntegrityError, PluginError, RequestError
from slotline.registry.ranked_policy import RankedPolicy

YES = Flag(True)


def policy(made: type, **capabilities: Any) -> Descriptor[Any]:
    """A policy of this class, which gets no context."""
    offer = SchedulerPolicyCapabilities(**capabilities)
    return Descriptor(kind=Kind.SCHEDULER_POLICY, name="mine", capabilities=offer, factory=lambda _: made())


def order(bench: Bench, steps: int = 400) -> list[str]:
    """The requests in the order in which they were admitted until none is left."""
    admitted: list[str] = []
    for _ in range(steps):
        admitted += [one.request_id for one in bench.step().admitted]
        if not bench.scheduler.num_waiting and not bench.scheduler.running:
            return admitted
    raise AssertionError(f"{bench.scheduler.num_waiting} requests still wait after {steps} steps: {admitted}")


def test_fcfs_reads_no_priority() -> None:
    bench = Bench(max_requests=1, policy=fcfs)
    for name, number in (("a", 5), ("b", -5), ("c", 0)):
        bench.add(name, 3, priority=number, max_tokens=1)
    assert order(bench) == ["a", "b", "c"]


def test_shortest_goes_by_prompt_and_most_outputs() -> None:
    bench = Bench(max_requests=1, policy=shortest, options=ShortestOptions(aging=1))
    for name, length, outputs in (("long", 20, 9), ("outputs", 2, 25), ("short", 4, 2), ("middle", 12, 2)):
        bench.add(name, length, max_tokens=outputs)
    assert order(bench) == ["short", "middle", "outputs", "long"]


def test_a_long_request_ages_until_no_later_one_goes_before_it() -> None:
    bench = Bench(max_requests=1, policy=shortest, options=ShortestOptions(aging=4))
    bench.add("first", 2, max_tokens=1)
    bench.step()
    bench.add("long", 22, max_tokens=2)  # 24 tokens, as 4 tokens of the fifth after it
    admitted = list[str]()
    for number in range(20):
        bench.add(str(number), 3, max_tokens=1)
        admitted += [one.request_id for one in bench.step().admitted]
    assert admitted.index("long") == 4


def test_tenants_take_turns_however_many_requests_one_has() -> None:
    bench = Bench(max_requests=1, policy=fair, options=FairOptions(quantum=4))
    for number in range(6):
        bench.add(f"a{number}", 3, max_tokens=1, inputs={"tenant": "a"})
    for name in ("b0", "b1"):
        bench.add(name, 3, max_tokens=1, inputs={"tenant": "b"})
    bench.add("nobody", 3, max_tokens=1)
    assert order(bench) == ["a0", "b0", "nobody", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_a_tenant_with_a_weight_gets_so_many_quanta() -> None:
    bench = Bench(max_requests=1, policy=fair, options=FairOptions(quantum=4, weights={"a": 3}))
    for number in range(6):
        for tenant in "ab":
            bench.add(f"{tenant}{number}", 3, max_tokens=1, inputs={"tenant": tenant})
    assert "".join(name[0] for name in order(bench)) == "aaabaaabbbbb"


def test_tokens_count_and_not_requests() -> None:
    bench = Bench(max_requests=1, policy=fair, options=FairOptions(quantum=8))
    for number in range(3):
        bench.add(f"long{number}", 15, max_tokens=1, inputs={"tenant": "long"})
    for number in range(12):
        bench.add(f"s{number}", 3, max_tokens=1, inputs={"tenant": "short"})
    assert "".join(name[0] for name in order(bench)) == "sslsssslsssslss"  # four short ones for each long one


def test_a_tenant_that_was_idle_has_saved_nothing() -> None:
    bench = Bench(max_requests=1, policy=fair, options=FairOptions(quantum=4))
    for number in range(9):
        bench.add(f"a{number}", 3, max_tokens=1, inputs={"tenant": "a"})
    for _ in range(4):
        bench.step()
    for number in range(4):
        bench.add(f"b{number}", 3, max_tokens=1, inputs={"tenant": "b"})
    assert "".join(name[0] for name in order(bench)) == "babababaa"


def test_a_request_is_charged_what_it_used() -> None:
    made = Fair(SchedulerPolicyContext(contract=1, max_requests=1, max_batched_tokens=8, max_model_len=64))
    one = PolicyRequest(number=0, num_prompt_tokens=4, num_tokens=4, max_tokens=40, inputs={"tenant": "a"})
    made.push(one)
    made.push(evolve(one, number=1))
    assert made.head() == 0
    made.remove(0)
    made.admitted(0)
    assert made._tenants["a"].charged == 44
    made.left(0, 10)
    assert made._tenants["a"].charged == 10
    made.remove(1)
    made.left(1, 4)  # aborted while it waited
    assert made._tenants == {}


@pytest.mark.parametrize("tenant", [5, "x" * 257, ["a"]])
def test_a_tenant_must_be_a_name(tenant: object) -> None:
    bench = Bench(policy=fair)
    made = request("a", [5])
    made.inputs["tenant"] = tenant
    with pytest.raises(RequestError, match="tenant="):
        bench.scheduler.validate(made)


class TwoTokens(RankedPolicy):
    """Limits steps with running requests to two tokens and a new request."""

    loads: ClassVar[list[PolicyLoad]] = []

    def budget(self, load: PolicyLoad) -> StepBudget:
        self.loads.append(load)
        return StepBudget(tokens=2, requests=1)


def test_a_budget_limits_a_step_while_requests_run() -> None:
    TwoTokens.loads.clear()
    bench = Bench(policy=policy(TwoTokens, budgets=YES))
    for name in "abcd":
        bench.add(name, 3, max_tokens=3)
    taken = [bench.step() for _ in range(3)]
    assert taken[0].num_tokens == 12  # nothing ran, so nobody was asked
    assert [one.num_tokens for one in taken[1:]] == [2, 2]
    assert [load.num_running for load in TwoTokens.loads] == [4, 4]
    assert [load.step for load in TwoTokens.loads] == [2, 3]
    assert order(bench) == []


def test_a_budget_limits_the_requests_that_join() -> None:
    bench = Bench(policy=policy(TwoTokens, budgets=YES))
    bench.add("a", 3, max_tokens=9)
    bench.step()
    for name in "bcd":
        bench.add(name, 1, max_tokens=2)
    assert [len(bench.step().admitted) for _ in range(3)] == [1, 0, 1]  # two rows run in the second step


class Solitary(RankedPolicy):
    """Lets odd requests join only alone."""

    def admits(self, request: PolicyRequest, load: PolicyLoad) -> bool:
        return request.number % 2 == 0


def test_a_veto_passes_a_request_over_until_nothing_runs() -> None:
    bench = Bench(policy=policy(Solitary, admits=YES))
    for name in ("0", "1", "2", "3", "4"):
        bench.add(name, 2, max_tokens=3)
    steps = [[one.request_id for one in bench.step().admitted] for _ in range(8)]
    assert steps == [["0", "2", "4"], [], [], ["1"], [], [], ["3"], []]


class FirstGivesWay(RankedPolicy):
    """Preempts the first in order."""

    def victim(self, running: Sequence[PolicyRequest]) -> int:
        assert [one.number for one in running] == sorted(one.number for one in running)
        return running[0].number


def test_the_victim_is_whom_the_policy_names_and_the_others_go_on() -> None:
    bench = Bench(num_blocks=6, max_model_len=16, prefix_caching=False, policy=policy(FirstGivesWay, victims=YES))
    made = [bench.add("a", 7, max_tokens=9), bench.add("b", 7, max_tokens=9), bench.add("c", 2, max_tokens=9)]
    preempted: list[Request] = []
    while not preempted:
        schedule = bench.step()
        preempted += schedule.preempted
    assert preempted == [made[0]]
    assert [one.status for one in made] == [Status.PREEMPTED, Status.RUNNING, Status.RUNNING]
    assert sorted(bench.names(schedule)) == ["b", "c"]
    assert sorted(order(bench)).count("a") >= 1
    assert [len(one.output_token_ids) for one in made] == [9, 9, 9]


class Wrong(RankedPolicy):
    """Answers what nobody can use."""

    def head(self) -> int:
        return 99

    def admits(self, request: PolicyRequest, load: PolicyLoad) -> Any:
        return None

    def budget(self, load: PolicyLoad) -> Any:
        return 7

    def victim(self, running: Sequence[PolicyRequest]) -> int:
        return -1


class WrongRank(RankedPolicy):
    """Ranks by a number."""

    def rank(self, request: PolicyRequest) -> Any:
        return request.number


def test_a_wrong_answer_is_an_error_that_names_the_policy() -> None:
    bench = Bench(policy=policy(Wrong, budgets=YES))
    bench.add("a", 3)
    with pytest.raises(PluginError, match="mine: head gave 99, and no such request waits"):
        bench.step()
    with pytest.raises(PluginError, match="mine: rank gave 0, expected a tuple"):
        Bench(policy=policy(WrongRank)).add("a", 3)
    queue = Bench(policy=policy(Wrong, budgets=YES, admits=YES, victims=YES)).scheduler._waiting
    one = request("a", [5])
    queue.push(one)
    with pytest.raises(PluginError, match="mine: budget gave 7, expected a StepBudget"):
        queue.begin_step(1)
    with pytest.raises(PluginError, match="mine: admits gave None, expected True or False"):
        queue.may_join(one, 1)
    with pytest.raises(PluginError, match="mine: victim gave -1, and no such request runs"):
        queue.victim([one])
    with pytest.raises(IntegrityError, match="number 0"):
        queue.push(request("b", [5]))


@pytest.mark.parametrize("values", [{"tokens": 0}, {"requests": -1}, {"tokens": True}, {"tokens": 2.0}])
def test_a_budget_of_nothing_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=rf"StepBudget\.{next(iter(values))}"):
        StepBudget(**values)


@pytest.mark.parametrize("descriptor", [fcfs, priority, shortest, fair], ids=lambda one: one.name)
def test_every_request_ends_though_blocks_are_few_and_the_engine_begins_anew(descriptor: Descriptor[Any]) -> None:
    bench = Bench(num_blocks=6, max_requests=3, max_model_len=16, max_batched_tokens=8, policy=descriptor)
    made = [
        bench.add(str(number), 1 + number % 7, max_tokens=1 + number % 9, priority=number % 3, inputs={"tenant": t})
        for number, t in enumerate("abacabadabacabae")
    ]
    for _ in range(9):
        bench.step()
    unfinished = [one for one in made if not one.finished]
    assert 0 < len(unfinished) < len(made)
    bench.scheduler.remove(unfinished.pop())
    for row in range(3):  # as after an exception
        if bench.rows.requests[row] is not None:
            bench.rows.invalidate(row)
    bench.scheduler.restore(unfinished)
    order(bench)
    assert all(one.finished for one in made)
    assert sum(one.metrics.num_preemptions for one in made) > 0
