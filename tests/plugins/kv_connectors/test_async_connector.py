"""Loads that end in later steps: their requests wait, others run, and a load that fails costs no token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from engine_driver import GREEDY, add, random_prompts, recorded, run_all, tokens_of
from repository import SUPPORT
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM, SamplingParams
from slotline.planner.plan import make_plan
from slotline.registry.config import load_config
from slotline.registry.errors import NegotiationError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = random_prompts([33, 40, 37, 26], seed=5)
MIXED = [*PROMPTS, PROMPTS[0][:16] + PROMPTS[2][:20]]
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {**DEFAULTS, "block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 3}
SLOW: dict[str, Any] = {
    "plugins.inline": (f"{SUPPORT / 'slow_connector.py'}:Slow",),
    "kv_connector.name": "slow",
    "kv_connector.leave_out_slow": False,
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {"scheduler.async": False},
    "asynchronous": {"scheduler.async": True},
    "drafted": {"drafter.name": "ngram", "drafter.tokens": 3},
}
WAYS = ("never", "some", "all", "start", "arrived", "held")


def connector_of(llm: LLM) -> Any:
    """The connector of an engine."""
    return llm.engine.extension("kv_transfer").transfers.connector


def settled(llm: LLM) -> None:
    """Nothing is left over, once the loads of aborted requests have ended."""
    llm.engine.extension("kv_transfer").transfers.finish()
    llm.engine.step()
    everything_returned(llm)


@pytest.fixture(scope="module")
def slow(tiny: Tiny) -> Callable[..., LLM]:
    made: dict[str, LLM] = {}

    def get(mode: str = "plain", how: str = "never", polls: int = 3) -> LLM:
        if mode not in made:
            made[mode] = LLM(tiny("llama"), **{**SMALL, **MODES[mode], **SLOW, "memory": "80KiB"})
        llm = made[mode]
        llm.engine.forget_prefixes()
        settled(llm)
        connector_of(llm).how, connector_of(llm).polls = how, polls
        return llm

    return get


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> list[list[int]]:
    return tokens_of(LLM(tiny("llama"), **SMALL), MIXED, SHORT)


ALWAYS = {("asynchronous", "some"), ("drafted", "never")}
CASES = [
    pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.exhaustive, id="-".join(case))
    for case in product(MODES, WAYS)
]


@pytest.mark.parametrize(("mode", "how"), CASES)
def test_texts_are_those_without_a_connector(
    mode: str, how: str, slow: Callable[..., LLM], want: list[list[int]]
) -> None:
    llm = slow(mode, how)
    assert tokens_of(llm, MIXED, SHORT) == want
    for name, prompt in (("a", PROMPTS[0]), ("b", PROMPTS[1]), ("c", PROMPTS[3])):
        add(llm, name, prompt, SHORT)
    for name in "abc":
        llm.engine.step()
        llm.engine.abort(name)
    outputs = llm.generate(MIXED, SHORT)
    assert [list(one.outputs[0].token_ids) for one in outputs] == want
    assert (sum(one.metrics.num_loaded_tokens for one in outputs) > 0) == (how in ("never", "some"))
    if how in ("some", "all", "start", "arrived"):
        assert sum(one.metrics.num_preemptions for one in outputs) > 0
    settled(llm)


def filled(llm: LLM) -> None:
    """Have the connector hold the prompts' blocks, and the pool none of them."""
    tokens_of(llm, MIXED, SHORT)
    llm.engine.scheduler.cache.pool.reset()


def test_others_run_while_a_request_waits(slow: Callable[..., LLM], want: list[list[int]]) -> None:
    """The one with the same prefix waits for the same blocks, which are loaded once."""
    llm = slow(polls=50)
    filled(llm)
    waits, same = add(llm, "waits", PROMPTS[0], SHORT), add(llm, "same", MIXED[4], SHORT)
    other = add(llm, "other", random_prompts([9], seed=77)[0], SHORT)
    with recorded(llm) as steps:
        while not other.finished:
            llm.engine.step()
    assert len(steps) < 15
    assert all(step.num_tokens > 0 for step in steps)
    assert waits.status.name == same.status.name == "RUNNING"
    assert llm.engine.rows.num_tokens[waits.row] == len(PROMPTS[0])
    run_all(llm)
    found = [one.output_token_ids for one in (waits, same)]
    assert found == [want[0], want[4]]
    settled(llm)


def test_steps_without_tokens_ask_what_has_arrived(slow: Callable[..., LLM]) -> None:
    llm = slow(polls=9)
    filled(llm)
    request = add(llm, "waits", PROMPTS[1], SHORT)
    before = connector_of(llm).calls
    with recorded(llm) as steps:
        run_all(llm)
    empty = [step for step in steps if not step.num_tokens]
    assert 9 <= len(empty) <= connector_of(llm).calls - before <= 14
    assert request.metrics.num_loaded_tokens == request.metrics.num_cached_tokens > 0
    settled(llm)


@pytest.mark.parametrize("load", [pytest.param("asynchronous", marks=pytest.mark.slow), "in the step"])
def test_a_store_slower_than_computing_is_left_out(load: str, tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    prompts = random_prompts([110, 105, 100], seed=6)
    settings = {**SMALL, "max_model_len": 128, **SLOW, "kv_connector.leave_out_slow": True}
    if load == "in the step":
        failing = f"{SUPPORT / 'failing_connector.py'}:Failing"
        settings |= {"plugins.inline": (failing,), "kv_connector.name": "failing", "kv_connector.failing.how": "slow"}
    llm = LLM(tiny("llama"), **settings)
    want = tokens_of(llm, prompts, SHORT)
    if load == "asynchronous":
        connector_of(llm).polls = 900
    loaded = []
    for _ in range(4):
        llm.engine.scheduler.cache.pool.reset()
        outputs = llm.generate(prompts, SHORT)
        assert [list(one.outputs[0].token_ids) for one in outputs] == want
        loaded.append(sum(one.metrics.num_loaded_tokens for one in outputs))
    assert loaded[0] > 0 == loaded[-1]
    events = llm.engine.extension("kv_transfer").counts.events[0]
    assert events["left_out"] == 1
    assert events["requests_left_out"] >= 3
    assert sum("it is left out for 64 requests" in one.message for one in caplog.records) == 1
    llm.engine.extension("kv_transfer").transfers.speed._left = 0  # 64 requests later
    llm.engine.scheduler.cache.pool.reset()
    assert llm.generate(prompts[:1], SHORT)[0].metrics.num_loaded_tokens > 0
    settled(llm) if load == "asynchronous" else everything_returned(llm)


def test_blocks_of_an_aborted_request_stay_held_until_they_have_arrived(slow: Callable[..., LLM]) -> None:
    llm = slow(polls=6)
    filled(llm)
    add(llm, "aborted", PROMPTS[1], SHORT)
    llm.engine.step()
    llm.engine.abort("aborted")
    pool, transfer = llm.engine.scheduler.cache.pool, llm.engine.extension("kv_transfer")
    coming = set(transfer.held_blocks())
    assert len(coming) == 9
    assert (pool.ref_count[list(coming)] == 1).all()
    for _ in range(9):
        llm.engine.step()
    assert not transfer.held_blocks()
    assert llm.generate([PROMPTS[1]], SHORT)[0].metrics.num_cached_tokens == 36  # from the pool, as they arrived
    settled(llm)


def test_an_exception_of_a_step_waits_for_what_is_under_way(slow: Callable[..., LLM], want: list[list[int]]) -> None:
    llm = slow(polls=6)
    filled(llm)
    request = add(llm, "waits", PROMPTS[0], SHORT)
    add(llm, "other", random_prompts([9], seed=78)[0], SHORT)
    llm.engine.step()
    assert connector_of(llm).coming
    model = llm.engine.runner.model
    model.forward, forward = None, model.forward
    with pytest.raises(TypeError):
        llm.engine.step()
    model.forward = forward
    assert not connector_of(llm).coming
    run_all(llm)
    assert request.output_token_ids == want[0]
    settled(llm)


@pytest.mark.parametrize(
    "family",
    [pytest.param("gemma3", marks=pytest.mark.slow), pytest.param("deepseek_v2", marks=pytest.mark.exhaustive)],
)
def test_groups_with_windows_and_latents_arrive_too(family: str, tiny: Tiny) -> None:
    layers = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    path = tiny(family, **(layers if family == "gemma3" else {}))
    plain, llm = LLM(path, **SMALL), LLM(path, **{**SMALL, **SLOW})
    expected = tokens_of(plain, MIXED, GREEDY)
    for how in ("never", "some"):
        connector_of(llm).how = how
        llm.engine.forget_prefixes()
        assert tokens_of(llm, MIXED, GREEDY) == expected
        llm.engine.scheduler.cache.pool.reset()
        outputs = llm.generate(MIXED, GREEDY)
        assert [list(one.outputs[0].token_ids) for one in outputs] == expected
        assert how == "some" or sum(one.metrics.num_loaded_tokens for one in outputs) > 0
    settled(llm)


@pytest.mark.slow
def test_a_block_has_arrived_once_all_ranks_have_it(tiny: Tiny, want: list[list[int]]) -> None:
    """One rank is slower, and loses what the other has."""
    ranks = ThreadRanks(tiny("llama"), **{**SMALL, **SLOW, "memory": "40KiB", "scheduler.async": True})
    for how in ("never", "some", "start", "arrived"):

        def run(llm: LLM, how: str = how) -> tuple[list[list[int]], int]:
            llm.engine.forget_prefixes()
            connector = connector_of(llm)
            connector.how, connector.polls = ("never", 2) if llm.engine.group.place.rank else (how, 7)
            assert tokens_of(llm, MIXED, SHORT) == want
            add(llm, "a", PROMPTS[0], SHORT)
            llm.engine.step()
            llm.engine.abort("a")
            outputs = llm.generate(MIXED, SHORT)
            return [list(one.outputs[0].token_ids) for one in outputs], sum(
                one.metrics.num_loaded_tokens for one in outputs
            )

        tokens, loaded = ranks.same(run)
        assert tokens == want
        assert (loaded > 0) == (how in ("never", "some"))
    ranks.each(settled)
    ranks.close()


def test_stages_over_ranks_are_refused(tiny: Tiny) -> None:
    values = {"model": str(tiny("llama_deep")), "device": "cpu", "parallel.pipeline": 2, **SLOW}
    with pytest.raises(NegotiationError, match="a request that waits for its blocks would have its turn"):
        make_plan(load_config(values=values))
