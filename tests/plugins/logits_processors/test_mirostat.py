"""Mirostat: equal to the algorithm of the paper, token by token, whatever else happens to the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import random_prompts, recorded, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_cases import MAX_REQUESTS, VOCAB_SIZE, Asked, batch_of, build, processed, some_logits

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.core.sampling.sampler import invert, uniforms
from slotline.registry.errors import ContractError, NegotiationError, RequestError
from slotline.testing.environments.logits_processor import parameters
from tests.engine.test_engine_equality import pool_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(19, 108)]
Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
INF = float("inf")


class Reference:
    """Algorithm 2 of the paper for one text, over lists: sort, cut, normalise, and learn from the token drawn."""

    def __init__(self, tau: float, eta: float, temperature: float) -> None:
        self.tau, self.eta, self.temperature, self.bound = tau, eta, temperature, 2 * tau

    def kept(self, logits: Sequence[float]) -> dict[int, float]:
        """The tokens that may come next, and their surprise in bits among themselves."""
        whole = _surprises({token: logit / self.temperature for token, logit in enumerate(logits)})
        least = min(whole.values())
        inside = {t: s for t, s in whole.items() if s <= self.bound or s == least}
        return _surprises({token: logits[token] / self.temperature for token in inside})

    def learn(self, surprise: float) -> None:
        self.bound -= self.eta * (surprise - self.tau)


def _surprises(scaled: dict[int, float]) -> dict[int, float]:
    most = max(scaled.values())
    total = sum(math.exp(value - most) for value in scaled.values())
    return {token: (math.log(total) - (value - most)) / math.log(2) for token, value in scaled.items()}


numbers = st.fixed_dictionaries(
    {
        "mirostat_tau": st.sampled_from([0.2, 0.9, 2.0, 3.5]),
        "mirostat_eta": st.sampled_from([0.1, 0.5, 1.3]),
        "temperature": st.sampled_from([0.5, 1.0, 1.9]),
    }
)


@given(asked=st.lists(numbers, min_size=1, max_size=MAX_REQUESTS), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_each_row_is_cut_where_the_paper_cuts_it(asked: list[dict[str, Any]], seed: int) -> None:
    """Rows come in any order, sit steps out and are shown again; the reference sees each of its places once."""
    rng, processor = Random(seed), build("mirostat")
    requests = [Asked(each, [3, 4], [], []) for each in asked]
    references = [Reference(each["mirostat_tau"], each["mirostat_eta"], each["temperature"]) for each in asked]
    for row, each in enumerate(asked):
        assert processor.admit(row, parameters(each), [3, 4])
    for step in range(15):
        rows = rng.sample(range(len(asked)), rng.randint(1, len(asked)))
        batch = batch_of([requests[row] for row in rows], rows)
        if rng.random() < 0.3:  # a step that is thrown away
            processor.apply(some_logits(len(rows), seed + 100 + step), batch)
        logits = some_logits(len(rows), seed + step)
        found = processor.apply(logits.clone(), batch)
        for place, row in enumerate(rows):
            kept = references[row].kept(logits[place].tolist())
            want = [logits[place, t].item() if t in kept else -INF for t in range(VOCAB_SIZE)]
            assert found[place].tolist() == want, references[row].bound
            token = rng.choice(sorted(kept))
            references[row].learn(kept[token])
            requests[row].output.append(token)


def test_a_row_begins_anew_with_each_request_and_its_memory_is_given_back() -> None:
    processor, settings = build("mirostat"), parameters({"mirostat_tau": 0.3, "mirostat_eta": 1.0})
    request, logits = Asked({}, [3], [], []), some_logits(3)
    first = []
    for _ in range(2):
        for row in (4, 0, 2):
            processor.admit(row, settings, [3])
        request.output.clear()
        first.append(processor.apply(logits.clone(), batch_of([request] * 3, [4, 0, 2])))
        request.output.append(int(logits[0].argmax()))
        processor.apply(logits.clone(), batch_of([request] * 3, [4, 0, 2]))
        for row in (0, 4, 2):
            processor.release(row)
        assert len(processor._log2) == 0
    assert torch.equal(*first)


def test_a_place_that_was_left_out_is_an_error_and_not_a_guess() -> None:
    processor, request = build("mirostat"), Asked({}, [3], [], [])
    processor.admit(1, parameters({"mirostat_tau": 3.0}), [3])
    processor.apply(some_logits(1), batch_of([request], [1]))
    request.output.extend([4, 5])
    with pytest.raises(ContractError, match="row 1 after 1 tokens and then after 3"):
        processor.apply(some_logits(1), batch_of([request], [1]))


def test_nan_among_the_models_logits_does_not_spoil_the_bound() -> None:
    processor, request = build("mirostat"), Asked({}, [3], [], [])
    processor.admit(0, parameters({"mirostat_tau": 1.0}), [3])
    bad, good = torch.full((1, VOCAB_SIZE), torch.nan), some_logits(1)
    assert processor.apply(bad, batch_of([request], [0])).isnan().all()
    request.output.append(1)
    want = processed("mirostat", [Asked({"mirostat_tau": 1.0}, [3], [], [])], good)
    assert torch.equal(processor.apply(good.clone(), batch_of([request], [0])), want)


def test_a_greedy_request_has_no_use_for_it() -> None:
    assert not build("mirostat").admit(0, parameters({"mirostat_tau": 1.0, "temperature": 0}), [3])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"mirostat_tau": True}, "mirostat_tau=True"),
        ({"mirostat_tau": INF}, "mirostat_tau=inf"),
        ({"mirostat_eta": 0.1}, "mirostat_eta=0.1 without mirostat_tau"),
        ({"mirostat_tau": 5.0, "top_p": 0.9}, "top_p=0.9 beside mirostat_tau"),
        ({"mirostat_tau": 5.0, "structured_outputs": StructuredOutputsParams(choice=["a"])}, "structured_outputs="),
    ],
)
def test_what_it_cannot_honour_is_refused_with_name_and_fix(given: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        build("mirostat").validate(parameters(given))
    assert named in str(caught.value)
    assert caught.value.fix


# ---- in an engine

USED: dict[str, Any] = {"logits_processors": {"mirostat": {}}}
SMALL: dict[str, Any] = {**USED, "block_size": 4, "scheduler.max_batched_tokens": 24}
PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])


def params_of(seed: int, **more: Any) -> SamplingParams:
    asked = {"mirostat_tau": 2.0, "mirostat_eta": 0.6}
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True, extra_args=asked, **more)


def test_the_text_is_the_papers_token_by_token(tiny: Tiny, engines: Engines) -> None:
    shown: dict[int, torch.Tensor] = {}

    def record(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits *= 20  # a model with random weights hardly prefers one token to another
        shown[len(output_token_ids)] = logits.clone()
        return logits

    params = params_of(9, repetition_penalty=1.3, logits_processors=[record])
    (found,) = tokens_of(engines(tiny("llama"), **USED), [[5, 6, 7]], params)
    reference, widths = Reference(2.0, 0.6, 0.8), set[int]()
    for place, token in enumerate(found):
        kept = reference.kept(shown[place].tolist())
        widths.add(len(kept))
        weights = torch.tensor([[2 ** -kept.get(t, INF) for t in range(shown[place].shape[0])]], dtype=torch.float64)
        number = uniforms(np.array([9], np.uint64), np.array([3 + place]))
        assert token == int(invert(weights, torch.from_numpy(number)))
        reference.learn(kept[token])
    assert len(widths) > 3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.behaviour(16, 40, 55, 109)
def test_the_same_text_alone_in_a_batch_and_after_preemption(asynchronous: bool, tiny: Tiny, engines: Engines) -> None:
    path, mode = tiny("llama"), {**SMALL, "scheduler.async": asynchronous}
    params = params_of(4)
    alone = engines(path, **USED)
    expected = [tokens_of(alone, [prompt], params)[0] for prompt in PROMPTS]
    without = SamplingParams(temperature=0.8, seed=4, max_tokens=20, ignore_eos=True)
    assert tokens_of(alone, PROMPTS, without) != expected
    assert tokens_of(engines(path, **mode), PROMPTS, params) == expected
    llm = engines(path, **mode, memory=pool_of(20, 4))
    with recorded(llm) as steps:
        assert tokens_of(llm, PROMPTS, params) == expected
    assert sum(len(step.preempted) for step in steps) > 0


def test_a_failure_of_another_processor_does_not_count_a_token_twice(tiny: Tiny, engines: Engines) -> None:
    """A step in which one request's function raises is run again row by row."""

    def fails_at_five(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 5:
            raise ValueError("five")
        return logits

    llm = engines(tiny("llama"), **USED)
    (expected,) = tokens_of(llm, [[5, 6]], params_of(3))
    good, bad = llm.generate([[5, 6], [5, 6]], [params_of(3), params_of(3, logits_processors=[fails_at_five])])
    assert good.outputs[0].token_ids == expected
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == expected[:5]


def test_beside_a_drafter_it_is_refused_with_the_reason(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError, match=r"'mirostat' cannot be used: N162[\s\S]*logits before it"):
        LLM(str(tiny("llama")), **USED, **{"drafter.name": "ngram", "drafter.tokens": 3})
