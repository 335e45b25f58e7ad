"""Scheduler policies in an engine: what configurations and prompts say to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import GREEDY, add
from tiny_engines import everything_returned

from slotline.core import LLM
from slotline.llm.settings import load_settings
from slotline.planner.plan import make_plan
from slotline.registry.errors import ConfigError, NegotiationError, PluginError, PluginNotFoundError, RequestError

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
PROMPTS = [list(range(5 + length, 5 + 2 * length)) for length in (9, 4, 7, 3, 8, 2)]
POLICIES: dict[str, dict[str, Any]] = {
    "priority": {},
    "shortest": {"scheduler_policy.shortest.aging": 3},
    "fair": {"scheduler_policy.fair.quantum": 8, "scheduler_policy.fair.weights.a": 2},
}
INLINE = """
from slotline.registry import Descriptor, Flag, Kind, Set
from slotline.registry.contracts import SchedulerPolicyCapabilities
from slotline.registry.ranked_policy import RankedPolicy


def describe(**offer):
    offer = SchedulerPolicyCapabilities(**offer)
    return Descriptor(kind=Kind.SCHEDULER_POLICY, name="mine", capabilities=offer, factory=lambda context: make())


class Stumbles(RankedPolicy):
    def admits(self, request, load):
        raise KeyError(request.number)


def make():
    return Stumbles()


alone = describe(ranks=Flag(False))
elsewhere = describe(devices=Set(("cuda",)))
stumbles = describe(admits=Flag(True))
boastful = describe(victims=Flag(True))
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Settings with one of the descriptors of `INLINE`."""
    (tmp_path / "mine.py").write_text(INLINE)
    return lambda name: {"plugins.inline": (f"{tmp_path}/mine.py:{name}",), "scheduler.policy": "mine"}


def prompt(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPTS[number], **more}


def test_texts_do_not_depend_on_the_policy(tiny: Tiny, engines: Engines) -> None:
    usual = [one.outputs[0].token_ids for one in engines(tiny("llama")).generate(PROMPTS, GREEDY)]
    for name, options in POLICIES.items():
        llm = engines(tiny("llama"), max_num_seqs=2, **{"scheduler.policy": name, **options})
        more = {"scheduling": {"tenant": "a"}} if name == "fair" else {}
        prompts = [prompt(number, **(more if number % 2 else {})) for number in range(len(PROMPTS))]
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)] == usual, name
        assert f"scheduler_policy {name} (slotline" in llm.plan.explain()
        everything_returned(llm)


def test_tenants_of_an_engine_take_turns(tiny: Tiny, engines: Engines) -> None:
    settings = {"scheduler.policy": "fair", "scheduler_policy.fair.quantum": 8}
    llm = engines(tiny("llama"), max_num_seqs=1, **settings)
    for name, tenant in (("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b"), ("b1", "b")):
        add(llm, name, [5, 6], GREEDY, tenant=tenant)
    ended = []
    while llm.engine.has_work:
        ended += [r.request_id for r in llm.engine.step().finished]
    assert [name[0] for name in ended] == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"scheduling": {"tenant": 5}}, r"tenant=5 is no name[\s\S]*fix: give a text"),
        ({"scheduling": {"deadline": 5}}, r"deadline=5: no extension of this engine takes it"),
        ({"scheduling": {"arrival": 5, "stream": True}}, "scheduling names arrival, stream"),
        ({"scheduling": "a"}, "scheduling='a' is no mapping"),
        ({"priority": 3}, "priority=3 under a policy without priorities"),
    ],
)
def test_what_the_policy_does_not_read_is_refused(
    given: dict[str, Any], says: str, tiny: Tiny, engines: Engines
) -> None:
    llm = engines(tiny("llama"), max_num_seqs=1, **{"scheduler.policy": "fair", "scheduler_policy.fair.quantum": 8})
    with pytest.raises(RequestError, match=says):
        llm.generate([prompt(0, **given)], GREEDY)
    assert not llm.engine.requests


def test_a_tenant_without_a_policy_for_it_is_refused_with_the_remedy(tiny: Tiny, engines: Engines) -> None:
    with pytest.raises(RequestError, match=r"tenant='a' under scheduler.policy = 'fcfs'[\s\S]*policy = \"fair\""):
        engines(tiny("llama")).generate([prompt(0, scheduling={"tenant": "a"})], GREEDY)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"scheduler.policy": "fifo"}, PluginNotFoundError, "fifo"),
        ({"scheduler_policy.shortest.aging": 0}, ConfigError, "shortest.aging: 0 is too small"),
        ({"scheduler_policy.fair.weights.a": 0}, ConfigError, "tenant 'a' has weight 0"),
    ],
)
def test_a_wrong_configuration_is_refused(
    settings: dict[str, Any], error: type[Exception], says: str, tiny: Tiny
) -> None:
    with pytest.raises(error, match=says):
        make_plan(load_settings(tiny("llama"), (), settings))


def test_a_policy_that_cannot_run_here_is_refused_with_every_reason(
    tiny: Tiny, mine: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(NegotiationError, match=r"scheduler.policy = 'mine'[\s\S]*N101"):
        make_plan(load_settings(tiny("llama"), (), mine("elsewhere")))
    make_plan(load_settings(tiny("llama"), (), mine("alone")))
    with pytest.raises(NegotiationError, match="2 ranks schedule alike"):
        make_plan(load_settings(tiny("llama"), (), {**mine("alone"), "parallel.tensor": 2}))


def test_a_veto_that_raises_ends_its_request_alone(
    tiny: Tiny, engines: Engines, mine: Callable[..., dict[str, Any]]
) -> None:
    llm = engines(tiny("llama"), **mine("stumbles"))
    first, second = llm.generate(PROMPTS[:2], GREEDY)
    assert (first.outputs[0].finish_reason, second.outputs[0].finish_reason) == ("length", "error")
    assert "mine" in str(second.outputs[0].stop_reason)
    everything_returned(llm)


def test_a_method_that_is_declared_and_missing_is_told_when_the_engine_is_built(
    tiny: Tiny, engines: Engines, mine: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(PluginError, match=r"mine.*no method 'victim'"):
        engines(tiny("llama"), **mine("boastful"))
