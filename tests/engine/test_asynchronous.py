"""Asynchronous scheduling: a step is prepared before the tokens of the one before are known, and nothing shows it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, add, random_prompts, recorded, run_all, tokens_of

from slotline.core import LLM, RequestOutput, SamplingParams
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.registry.errors import NegotiationError
from tests.engine.test_engine_equality import pool_of

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
ON: dict[str, Any] = {"scheduler.async": True, "observability.check_integrity": True}
SMALL: dict[str, Any] = {"block_size": 4, "scheduler.max_batched_tokens": 24}
PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, top_p=0.8, top_k=40, min_p=0.01, seed=7, max_tokens=20),
    "penalties": SamplingParams(
        temperature=0.7, seed=3, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.3, max_tokens=20
    ),
    "greedy penalties": SamplingParams(temperature=0, repetition_penalty=1.8, max_tokens=20, ignore_eos=True),
    "bias and minimum": SamplingParams(
        temperature=0.5, seed=1, logit_bias={5: 3.0, 6: -9.0}, min_tokens=6, max_tokens=20
    ),
    "log-probabilities": SamplingParams(temperature=0.8, seed=2, logprobs=3, prompt_logprobs=2, max_tokens=9),
    "stop tokens": SamplingParams(temperature=1.0, seed=5, stop_token_ids=list(range(3, 60)), max_tokens=40),
}


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """What a request gave, log-probabilities rounded."""

    def rounded(entries: Any) -> Any:
        return entries and [e and {t: (round(v.logprob, 3), v.rank) for t, v in e.items()} for e in entries]

    return [
        (c.token_ids, c.finish_reason, c.stop_reason, rounded(c.logprobs), rounded(o.prompt_logprobs))
        for o in outputs
        for c in o.outputs
    ]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.behaviour(20, 55, 88, 107, 108, 109, 116)
def test_outputs_equal_those_of_one_step_after_the_other(params: SamplingParams, tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    one_by_one, overlapped = engines(path, **SMALL, **{"scheduler.async": False}), engines(path, **SMALL, **ON)
    for _ in range(2):  # the second time with cached prefixes
        assert seen(overlapped.generate(PROMPTS, params)) == seen(one_by_one.generate(PROMPTS, params))


@pytest.mark.parametrize("params", [PARAMS["greedy"], PARAMS["penalties"]], ids=["greedy", "penalties"])
@pytest.mark.behaviour(16, 40, 55)
def test_preempted_requests_give_the_same_tokens(params: SamplingParams, tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    expected = tokens_of(engines(path, **SMALL), PROMPTS, params)
    llm = engines(path, **SMALL, **ON, memory=pool_of(20, 4))
    with recorded(llm) as steps:
        outputs = llm.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert sum(len(step.preempted) for step in steps) > 0


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **ON)
    events: list[str] = []
    runner = llm.engine.runner
    places = {"launch": (runner, "launch"), "sample": (runner.head, "start"), "finish": (runner.head, "finish")}
    originals = {name: getattr(*place) for name, place in places.items()}

    def noted(name: str) -> Callable[[Any], Any]:
        def call(argument: Any) -> Any:
            events.append(name)
            return originals[name](argument)

        return call

    for name, place in places.items():
        setattr(*place, noted(name))
    try:
        llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    finally:
        for place in places.values():
            delattr(*place)
    assert events == ["launch", "sample", "launch", "finish", "sample", "launch", "finish", "sample", "finish"]


def test_a_request_that_met_its_limit_is_not_run_again_and_one_that_stopped_is_once(
    tiny: Tiny, engines: Engines
) -> None:
    llm = engines(tiny("llama"), **ON)
    (free,) = tokens_of(llm, PROMPTS[:1], GREEDY)
    with recorded(llm) as steps:
        llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert sum(step.num_tokens > 0 for step in steps) == 5
    stop = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[free[4]])
    with recorded(llm) as steps:
        (output,) = llm.generate(PROMPTS[:1], stop)
    assert output.outputs[0].token_ids == free[: free.index(free[4]) + 1]
    assert sum(step.num_tokens > 0 for step in steps) == len(output.outputs[0].token_ids) + 1


@pytest.mark.behaviour(33)
def test_requests_that_come_and_go_at_random_give_the_same_tokens(tiny: Tiny, engines: Engines) -> None:
    path, rng = tiny("llama"), Random(11)
    prompts = random_prompts([rng.randrange(1, 40) for _ in range(24)], seed=9)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=rng.randrange(1, 24)) for i in range(24)]
    expected = [o.outputs[0].token_ids for o in engines(path, **SMALL).generate(prompts, params)]
    llm = engines(path, **SMALL, **ON, memory=pool_of(30, 4), max_num_seqs=5)
    given, aborted, waiting = {}, {}, list(range(24))
    while waiting or llm.engine.has_work:
        for _ in range(rng.randrange(3)):
            if waiting:
                index = waiting.pop(0)
                given[index] = add(llm, str(index), prompts[index], params[index])
        if rng.random() < 0.1 and llm.engine.requests:
            name = rng.choice(list(llm.engine.requests))
            aborted[int(name)] = llm.engine.abort(name)
        llm.engine.step()
    assert 0 < len(aborted) < 20
    for index, request in given.items():
        tokens = request.output_token_ids
        assert tokens == expected[index][: len(tokens)]
        assert index in aborted or tokens == expected[index]
    pool = llm.engine.scheduler.cache.pool
    assert pool.num_free == pool.num_blocks - 1
    assert llm.engine.rows.num_free == 5


def test_a_row_may_be_taken_by_another_request_while_its_last_step_is_in_flight(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    expected = tokens_of(engines(path), PROMPTS[:2])
    llm = engines(path, **ON, max_num_seqs=1)
    first = add(llm, "one", PROMPTS[0])
    for _ in range(4):
        llm.engine.step()
    llm.engine.abort("one")
    second = add(llm, "one", PROMPTS[1])
    run_all(llm)
    assert first.output_token_ids == expected[0][:3]  # the fourth was in flight
    assert second.output_token_ids == expected[1]


def test_the_log_probabilities_of_a_prompt_that_is_given_up_in_mid_way_go_with_it(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **SMALL, **ON)
    scored = add(llm, "one", PROMPTS[3], SamplingParams(prompt_logprobs=0, max_tokens=2))
    other = add(llm, "two", PROMPTS[0])
    llm.engine.step()  # its first chunk is in flight
    llm.engine.abort("one")
    run_all(llm)
    assert scored.prompt_logprobs == [None] * len(PROMPTS[3])
    assert other.output_token_ids == tokens_of(llm, PROMPTS[:1])[0]


def test_a_streamed_text_is_the_same(tiny: Tiny, engines: Engines) -> None:
    llm, params = LLM(**{"scheduler.async": True, "max_model_len": 128}), SamplingParams(temperature=0, max_tokens=12)
    expected = LLM(max_model_len=128).generate("def main(", params)[0].outputs[0].text
    texts = [output.outputs[0].text for output in llm.stream("def main(", params)]
    assert texts[-1] == expected
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_auto_is_off_on_a_cpu_and_says_why_and_a_drafter_that_reads_the_host_forbids_it(tiny: Tiny) -> None:
    llm = LLM(tiny("llama"), device="cpu")
    assert not llm.engine.asynchronous
    assert "scheduler.async" in llm.plan.explain()
    (setting,) = [s for s in llm.plan.settings if s.key == "scheduler.async"]
    assert (setting.asked, setting.resolved) == ("auto", "false")
    assert "cores" in setting.origin
    with pytest.raises(NegotiationError, match=r"scheduler\.async = true .* drafter\.name = 'ngram'") as caught:
        LLM(tiny("llama"), device="cpu", **{"scheduler.async": True, "drafter.name": "ngram"})
    assert "remove [drafter]" in str(caught.value)


def test_the_table_turns_stand_ins_into_the_tokens_sampled_last() -> None:
    table = PlaceholderTokens(10, 3, "cpu")
    assert table.resolve(torch.tensor([0, 9, 10, 12])).tolist() == [0, 9, 0, 0]
    table.record(torch.from_numpy(table.stand_ins(np.array([2, 0]))), torch.tensor([7, 4]))
    assert table.resolve(torch.tensor([12, 3, 11, 10])).tolist() == [7, 3, 0, 4]
