"""Verification cannot change what is generated: exact distributions on a vocabulary of eight, and hundreds of texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from distributions import BATCH, DRAFTERS, SETTINGS, TEXTS, VOCAB, K, against, by_drafter, law_of
from engine_driver import GREEDY, add, random_prompts, recorded, run_all, tokens_of

from slotline.core import LLM, SamplingParams
from slotline.registry.contracts import Draft, DraftBatch
from slotline.registry.errors import ConfigError
from slotline.testing.oracles.drafter import SIGNIFICANCE, ChiSquare
from tests.proposers.test_drafting import NGRAM, drafted_by, guided, pool_of

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]


class Bigram:
    """Draws from a random table by the last token; says what it drew from in one of several ways."""

    def __init__(self, how: str, seed: int = 0) -> None:
        self.how = how
        weights = np.random.default_rng(seed).normal(0.0, 1.5, (VOCAB, VOCAB))
        self.table = torch.from_numpy(weights).softmax(-1)

    def admit(self, row: int, prompt_token_ids: list[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def propose(self, batch: DraftBatch) -> Draft:
        assert batch.uniforms is not None
        last, ids, given = batch.last_token_ids, [], []
        for position in range(K):
            given.append(self.table[last])
            cumulative = given[-1].cumsum(-1)
            number = torch.from_numpy(batch.uniforms[:, position : position + 1]) * cumulative[:, -1:]
            last = torch.searchsorted(cumulative, number, right=True).squeeze(1)
            ids.append(last)
        token_ids, probabilities = torch.stack(ids, 1), torch.stack(given, 1)
        if self.how == "one-point":
            return Draft(token_ids=token_ids)
        if self.how in ("ends early", "filled up"):
            token_ids[::2, 1] = -1
        if self.how == "unnormalised":
            probabilities = probabilities * 3
        return Draft(token_ids=token_ids, probabilities=probabilities.float())


CASES = [(how, name) for how in ("probabilities", "one-point") for name in SETTINGS]
CASES += [("ends early", "plain"), ("unnormalised", "plain"), ("filled up", "plain")]


def measured(how: str, name: str, tiny: Tiny, engines: Engines) -> tuple[int, ChiSquare]:
    """Drafts that stood of those that `Bigram` drew, up to three behind a text's first token, and the texts' test."""
    path = tiny("llama", vocab_size=VOCAB, initializer_range=0.2)
    scoring = engines(path, **{"sampling.max_logprobs": VOCAB}, **BATCH)
    law = law_of(scoring, SamplingParams(**SETTINGS[name]))
    llm = engines(path, **{**NGRAM, "drafter.tokens": K}, **BATCH)
    before = llm.engine.extension("drafts").drafting.counts.accepted
    llm.engine.extension("drafts").drafting.uniform = how == "filled up"  # as where batches with drafts are captured
    with drafted_by(llm, Bigram(how)):
        result = against(llm, law, SETTINGS[name])
    assert llm.engine.extension("drafts").drafting.counts.failures == 0
    return llm.engine.extension("drafts").drafting.counts.accepted - before, result


@pytest.mark.spread(2)
@pytest.mark.parametrize(("how", "name"), CASES, ids=[f"{how}, {name}" for how, name in CASES])
def test_text_has_the_targets_distribution(tiny: Tiny, engines: Engines, how: str, name: str) -> None:
    """Seeds are fixed, the level is one in a million."""
    accepted, result = measured(how, name, tiny, engines)
    assert accepted > TEXTS / 10
    assert result.freedom >= 10
    assert result.p_value > SIGNIFICANCE, result


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_has_the_targets_distribution_beside_every_drafter(
    tiny: Tiny, engines: Engines, tmp_path: Path, name: str
) -> None:
    accepted, result = by_drafter(name, tmp_path / name, tiny, engines)
    assert accepted > TEXTS / 100
    assert result.freedom >= 10
    assert result.p_value > SIGNIFICANCE, result


def test_a_seeded_text_does_not_depend_on_the_batch_around_it(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama", vocab_size=VOCAB, initializer_range=0.2)
    llm = engines(path, **{**NGRAM, "drafter.tokens": K})
    prompts = random_prompts((4, 9, 2, 7, 12), seed=1, vocab_size=VOCAB)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True) for i in range(5)]
    with drafted_by(llm, Bigram("probabilities")):
        together = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        alone = [llm.generate(p, each)[0].outputs[0].token_ids for p, each in zip(prompts, params, strict=True)]
    assert together == alone


@pytest.mark.spread(1)
@pytest.mark.parametrize("tokens", [1, 2, 5, 9])
def test_hundreds_of_greedy_texts_are_the_same(tiny: Tiny, engines: Engines, tokens: int) -> None:
    """100 requests for each k, of any length, through a pool that is too small and in chunks; half share prefixes."""
    rng = Random(tokens)
    path = tiny("llama")
    plain = engines(path)
    llm = engines(
        path, **{**NGRAM, "drafter.tokens": tokens}, memory=pool_of(9), max_num_batched_tokens=24, max_num_seqs=6
    )
    heads = random_prompts((16, 32), seed=tokens)
    prompts = random_prompts([rng.randint(1, 30) for _ in range(100)], seed=tokens + 100)
    prompts = [rng.choice(heads) + p[:8] if rng.random() < 0.5 else p for p in prompts]
    params = [SamplingParams(temperature=0, max_tokens=rng.randint(1, 14), ignore_eos=True) for _ in prompts]
    expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    drafter = guided(prompts, expected, rng.choice((0.5, 0.8)))
    drafter.num_tokens = tokens
    accepted = llm.engine.extension("drafts").drafting.counts.accepted
    with drafted_by(llm, drafter):
        requests = [add(llm, str(i), p, each) for i, (p, each) in enumerate(zip(prompts, params, strict=True))]
        run_all(llm)
    assert [r.output_token_ids for r in requests] == expected
    assert llm.engine.extension("drafts").drafting.counts.accepted > accepted
    assert sum(r.metrics.num_preemptions for r in requests) > 0
    assert sum(r.metrics.num_cached_tokens > 0 for r in requests) > 5


def test_drafts_that_are_filled_up_make_uniform_batches_and_the_same_texts(tiny: Tiny, engines: Engines) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **NGRAM)
    prompts = random_prompts((5, 40, 17, 1, 30, 12), seed=3)
    drafting = llm.engine.extension("drafts").drafting
    for params in (GREEDY, SamplingParams(temperature=0.9, seed=11, max_tokens=20, ignore_eos=True)):
        expected, before = tokens_of(plain, prompts, params), drafting.counts.proposed
        drafting.uniform = True
        with drafted_by(llm, guided(prompts, expected)), recorded(llm) as schedules:
            assert tokens_of(llm, prompts, params) == expected
        drafting.uniform = False
        verifying = [s for s in schedules if s.num_tokens > len(s.rows) and not s.admitted]
        assert sum(set(s.num_scheduled.tolist()) == {5} for s in verifying) >= len(verifying) / 3  # before any ends
        assert drafting.counts.proposed - before < sum(s.num_tokens - len(s.rows) for s in verifying)


class Failing:
    """Repeats the last token, and fails once the way it was told to, for one request or for all."""

    def __init__(self, what: str) -> None:
        self.what, self.calls = what, 0

    def admit(self, row: int, prompt_token_ids: list[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def propose(self, batch: DraftBatch) -> Draft:
        self.calls += 1
        ids = batch.last_token_ids[:, None].repeat(1, 4)
        if self.calls == 4:
            if self.what == "raises":
                raise RuntimeError("lost its way")
            ids[1, 2] = 384
        return Draft(token_ids=ids)


@pytest.mark.parametrize(("what", "lost"), [("raises", 3), ("vocabulary", 1)])
def test_a_failure_in_the_middle_of_a_run_is_told_and_costs_one_proposal(
    tiny: Tiny, engines: Engines, what: str, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **NGRAM)
    prompts = random_prompts((9, 5, 12), seed=3)
    expected, sizes = tokens_of(plain, prompts), []
    with drafted_by(llm, Failing(what)):
        requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
        while llm.engine.has_work:
            llm.engine.step()
            rows = [request.row for request in requests if request.row >= 0]
            sizes.append(llm.engine.rows.num_spec_tokens[rows].tolist())
    assert [request.output_token_ids for request in requests] == expected
    counts = llm.engine.extension("drafts").drafting.counts
    assert counts.failures == lost
    assert ("lost its way" if what == "raises" else "384") in counts.last_failure
    assert [r.message for r in caplog.records if "drafter:" in r.message]
    assert sizes[3] == ([0, 0, 0] if what == "raises" else [4, 2, 4])
    assert sizes[4] == [4, 4, 4]


def test_no_draft_tokens_is_a_fault_of_the_configuration(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"drafter.tokens"):
        LLM(tiny("llama"), **{"drafter.name": "ngram", "drafter.tokens": 0})
