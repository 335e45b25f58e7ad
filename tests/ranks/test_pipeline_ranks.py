"""Layers divided among processes: one process's tokens and log-probabilities, whatever happens to the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import add, random_prompts, run_all
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from slotline.core.batch.request import Request
from slotline.planner.plan import make_plan
from slotline.plugins.pipeline_ranks.turns import Turns
from slotline.registry.config import load_config
from slotline.registry.errors import NegotiationError, SlotlineError

Tiny = Callable[..., Path]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "observability.check_integrity": True,
    "observability.progress": False,
}
TEXTS = ["def main(", "class A:\n    def", "import numpy as np\n", "for i in range(", "x = ", "from os import"]
REGEX = StructuredOutputsParams(regex="[a-c]{3}[0-9]+")
PLAIN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SCORED = SamplingParams(temperature=0.7, seed=5, max_tokens=10, logprobs=3, prompt_logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def one() -> LLM:
    """The small model in this process."""
    return LLM(**SETTINGS, memory="64MiB")


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    """The small model over two processes, unevenly, with steps prepared ahead and few blocks."""
    llm = LLM(**SETTINGS, memory="1280KiB", pipeline=2, **{"parallel.layers": (3, 5), "scheduler.async": True})
    yield llm
    everything_returned(llm)
    llm.close()


def same(found: LLM, wanted: LLM, prompts: list[Any], params: Any) -> None:
    """Both give the same."""
    compare(found.generate(prompts, params), wanted.generate(prompts, params))


def compare(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """They are the same tokens, with log-probabilities that are as near as float32 allows."""
    for a, b in zip(found, expected, strict=True):
        assert [one.token_ids for one in a.outputs] == [one.token_ids for one in b.outputs]
        assert [one.finish_reason for one in a.outputs] == [one.finish_reason for one in b.outputs]
        for x, y in zip(scores(a), scores(b), strict=True):
            assert x == pytest.approx(y, abs=2e-4)


def scores(output: Any) -> Iterator[dict[int, float]]:
    """The log-probabilities of each position of the prompt and of each output."""
    for entries in (output.prompt_logprobs, *(one.logprobs for one in output.outputs)):
        for entry in entries or ():
            yield {} if entry is None else {token: value.logprob for token, value in entry.items()}


@pytest.mark.behaviour(9, 37, 43, 90, 98, 101)
def test_text_and_log_probabilities_are_those_of_one_process(one: LLM, pair: LLM) -> None:
    """Prompts in chunks, and the second time behind cached prefixes."""
    long = [ids * 9 for ids in random_prompts([13, 11], vocab_size=200)]
    for _ in range(2):
        same(pair, one, [*TEXTS, *long], PLAIN)
    same(pair, one, [*TEXTS[:3], long[0]], SCORED)
    same(pair, one, TEXTS[:2], SamplingParams(n=3, temperature=0.9, top_p=0.9, seed=1, max_tokens=9))


@pytest.mark.slow
def test_requests_that_lose_their_blocks_are_computed_again(one: LLM, pair: LLM) -> None:
    prompts = random_prompts([40, 35, 44, 38, 41, 39], vocab_size=200)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    requests = [add(pair, f"r{i}", ids, params) for i, ids in enumerate(prompts)]
    run_all(pair)
    assert any(request.metrics.num_preemptions for request in requests)
    assert [output_of(r) for r in requests] == [o.outputs[0].token_ids for o in one.generate(prompts, params)]


def output_of(request: Request) -> list[int]:
    assert request.output_token_ids is not None
    return list(request.output_token_ids)


@pytest.mark.behaviour(98)
def test_both_ranks_have_a_step_of_their_own_requests(one: LLM, pair: LLM) -> None:
    engine, prompts = pair.engine, random_prompts([5, 6, 7, 8], vocab_size=200)
    requests = [add(pair, f"r{i}", ids, PLAIN) for i, ids in enumerate(prompts)]
    seen = []
    for _ in range(12):
        engine.step()
        seen.append([step.schedule.rows.tolist() for step in engine._in_flight])
    assert all(len(step) == 2 for rows in seen[4:] for step in rows), seen
    assert all(len(rows) == 2 and not {*rows[0]} & {*rows[1]} for rows in seen[4:]), seen
    aborted = engine.abort("r1")
    run_all(pair)
    assert aborted is requests[1]
    assert aborted.finish_reason == "abort"
    expected = [o.outputs[0].token_ids for o in one.generate(prompts, PLAIN)]
    assert [output_of(requests[i]) for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def test_grammars_and_processors_work_on_the_rank_that_samples(one: LLM, pair: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=12, structured_outputs=REGEX),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.4, bad_words=["import"]),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, guidance_scale=1.5, negative_prompt="class"),
        SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, min_p=0.1, min_tokens=4),
    ]
    same(pair, one, TEXTS[:4], params)


def test_a_request_that_fails_there_fails_here_with_the_same_reason(one: LLM, pair: LLM) -> None:
    """Every token is banned: the reason is known to the last rank alone."""
    none = SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=3)
    found, expected = [llm.generate([TEXTS[0], TEXTS[1]], [none, PLAIN]) for llm in (pair, one)]
    for a, b in zip(found, expected, strict=True):
        assert (a.outputs[0].token_ids, a.outputs[0].finish_reason) == (
            b.outputs[0].token_ids,
            b.outputs[0].finish_reason,
        )
        assert a.outputs[0].stop_reason == b.outputs[0].stop_reason


def test_the_plan_names_ranks_layers_and_parameters(one: LLM, pair: LLM) -> None:
    first, last = pair.plan.to_json()["stages"]
    assert (first["device"], first["first_layer"], first["end_layer"]) == ("rank 0", 0, 3)
    assert (last["device"], last["first_layer"], last["end_layer"]) == ("rank 1", 3, 8)
    text = " ".join(pair.plan.explain().split())
    assert f"0 on rank 0: layers 0 to 2, {first['num_parameters']:,} parameters" in text
    model, whole = pair.engine.runner.model, one.engine.runner.model
    assert model.weight_bytes < 0.5 * whole.weight_bytes  # type: ignore[attr-defined]
    assert [layer.index for group in pair.engine.runner.router.groups for layer in group.layers] == [0, 1, 2]


@pytest.mark.spread(1)
@pytest.mark.behaviour(9, 37, 43, 98)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama_deep", {"drafter.name": "ngram", "drafter.tokens": 3, "drafter.ngram.min_tokens": 1}),
        ("llama_deep", {"pipeline": 3, "model_family.transformers_decoder.lean": False, "scheduler.async": True}),
        ("qwen3_next", {"scheduler.async": True}),
        pytest.param("bamba", {"parallel.layers": (1, 3)}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", {"drafter.name": "ngram", "drafter.tokens": 2}, marks=pytest.mark.exhaustive),
        pytest.param("gemma2", {"pipeline": 4}, marks=pytest.mark.exhaustive),
        pytest.param("mixtral", {"scheduler.async": True, "batch_invariant": False}, marks=pytest.mark.exhaustive),
    ],
    ids=["drafts", "three", "states", "uneven states", "states and drafts", "windows", "experts"],
)
def test_other_plans_give_one_process_tokens(
    family: str, settings: dict[str, Any], tiny: Tiny, engines: Callable[..., LLM]
) -> None:
    """Ranks as threads: drafts, stages by the dozen, states in one stage or in both, windows; with chunks and prefixes.

    Few blocks, so that requests lose theirs.
    """
    alone = {key: value for key, value in settings.items() if not key.startswith(("parallel", "pipeline"))}
    small = {"block_size": 16, "max_model_len": 128, "max_num_batched_tokens": 48, "optimize": True}
    whole = engines(tiny(family), **small, **alone)
    given = {**DEFAULTS, **small, "memory": "200KiB", "pipeline": 2, **settings}
    ranks = ThreadRanks(tiny(family), tensor=1, **given)
    prompts = random_prompts([3, 60, 17, 35, 9], vocab_size=200)
    prompts = [*prompts, prompts[1][:40] * 2, [7, 8, 9] * 12]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, seed=2, max_tokens=9, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    for params in (greedy, greedy, drawn):
        expected = whole.generate(prompts, params)
        for found in ranks.each(lambda llm, params=params: llm.generate(prompts, params)):  # type: ignore[misc]
            compare(found, expected)
    ranks.each(everything_returned)
    ranks.close()


# --- the choice of each step's requests


def test_steps_take_turns_and_every_request_goes_on() -> None:
    turns, rows = Turns(2, 8), np.arange(5)
    turns.unfinished = 5
    steps = [np.zeros(0, np.int64)]
    for _ in range(6):
        turns.begin()
        taken = np.flatnonzero(turns.limit(rows, np.ones(5, np.int64)))
        assert not {*taken.tolist()} & {*steps[-1].tolist()}
        steps.append(taken)
        turns.launched(taken)
        if len(steps) > 2:
            turns.ended()
    assert [len(step) for step in steps[1:]] == [3, 2, 3, 2, 3, 2]


def test_a_lone_request_is_in_every_step_unless_another_waits() -> None:
    turns, rows, counts = Turns(2, 8), np.arange(1), np.ones(1, np.int64)
    turns.unfinished = 1
    turns.launched(rows)
    assert turns.limit(rows, counts).tolist() == [1]
    turns.unfinished = 2
    turns.begin()
    assert turns.limit(rows, counts).tolist() == [0]
    assert turns.may_begin()
    turns.begun()
    assert not turns.may_begin()


# --- refusals


@pytest.mark.parametrize(
    ("family", "settings", "text"),
    [
        ("llama_deep", {"scheduler.microbatches": 2}, "scheduler.microbatches = 2: the ranks work on different steps"),
        ("llama_deep", {"parallel.pipeline": 5}, "5 stages for 4 layers"),
        ("mixtral", {"parallel.tensor": 2, "parallel.expert": 2, "parallel.expert_loads": True}, "expert_loads = true"),
        ("gemma3n", {"parallel.layers": (5, 1)}, "reads the cache of"),
        ("gemma3n", {"parallel.layers": (1, 5)}, "layers of Gemma3nForCausalLM read more of the tokens"),
    ],
)
@pytest.mark.behaviour(15)
def test_what_does_not_work_over_ranks_is_refused_by_name(
    family: str, settings: dict[str, Any], text: str, tiny: Tiny
) -> None:
    values = {"model": str(tiny(family)), "device": "cpu", "parallel.pipeline": 2, **settings}
    with pytest.raises(SlotlineError) as refused:
        make_plan(load_config(values=values))
    assert isinstance(refused.value, NegotiationError), refused.value
    assert text in " ".join(str(refused.value).split())
    assert refused.value.fix
