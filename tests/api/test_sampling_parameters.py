"""Parameters that act around the sampler: allowed tokens, bad words, best_of, and how wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_driver import random_prompts, tokens_of
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import RequestError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(7, 108)]

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
MODES: list[dict[str, Any]] = [{}, {"scheduler.async": True}, {"drafter.name": "ngram", "drafter.tokens": 4}]


@pytest.fixture(params=MODES, ids=["plain", "asynchronous", "drafted"])
def llm(request: pytest.FixtureRequest, tiny: Tiny, engines: Engines) -> LLM:
    return engines(tiny("llama"), **request.param)


def test_only_allowed_tokens_come_out(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, allowed_token_ids=[7, 8, 300])
    outputs = llm.generate(random_prompts([5, 9]), params)
    assert [set(output.outputs[0].token_ids) for output in outputs] == [{7, 8, 300}] * 2


def test_a_bad_word_does_not_come_out_with_or_without_a_space_before_it(llm: LLM) -> None:
    prompt, common = "The quick brown fox", {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    bias = {token: 60.0 for word in ("brown", " brown", " fox") for token in llm.tokenizer.encode(word)}
    (free,) = llm.generate(prompt, SamplingParams(logit_bias=bias, **common))
    words = {word: free.outputs[0].text.count(word) for word in ("brown", "fox")}
    bad = max(words, key=lambda word: words[word])
    assert words[bad]
    (output,) = llm.generate(prompt, SamplingParams(logit_bias=bias, bad_words=bad, **common))
    assert output.outputs[0].finish_reason == "length"
    for form in (bad, f" {bad}"):
        tokens = llm.tokenizer.encode(form)
        found = output.outputs[0].token_ids
        assert tokens not in [found[i : i + len(tokens)] for i in range(len(found))]


def test_bad_words_become_tokens_at_admission_once_each(llm: LLM) -> None:
    given = SamplingParams(bad_words=["fox", " fox"], bad_words_token_ids=[[9, 10]], max_tokens=1)
    request = llm.engine.add("words", [5, 6], given)
    tokenised = request.params.bad_words_token_ids
    assert tokenised[0] == (9, 10)
    assert set(tokenised[1:]) == {tuple(llm.tokenizer.encode(form)) for form in ("fox", " fox")}
    assert len(set(tokenised)) == len(tokenised)
    llm.engine.abort("words")


# ---- best_of


@pytest.mark.parametrize("n", [1, 2])
def test_best_of_gives_the_most_likely_of_its_samples_best_first(llm: LLM, n: int) -> None:
    common: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    (prompt,) = random_prompts([7], seed=3)
    (every,) = llm.generate([prompt], SamplingParams(n=5, logprobs=0, **common))
    (best,) = llm.generate([prompt], SamplingParams(n=n, best_of=5, **common))
    ranked = sorted(every.outputs, key=lambda output: -(output.cumulative_logprob or 0))
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:n]]
    assert [output.index for output in best.outputs] == list(range(n))
    assert [output.logprobs for output in best.outputs] == [None] * n
    assert best.outputs[0].cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob, abs=1e-4)
    assert best.finished


def test_best_of_equal_to_n_selects_nothing(llm: LLM) -> None:
    params = {"seed": 5, "max_tokens": 4, "ignore_eos": True}
    (plain,) = llm.generate([[5, 6]], SamplingParams(n=2, **params))
    (same,) = llm.generate([[5, 6]], SamplingParams(n=2, best_of=2, **params))
    assert [output.token_ids for output in same.outputs] == [output.token_ids for output in plain.outputs]


def test_a_failed_sample_is_not_the_best(llm: LLM) -> None:
    def fails_at_once(output: list[int], logits: Any) -> Any:
        calls.append(0)
        return None if len(calls) < 3 else logits  # the first sample, and its second try

    calls: list[int] = []
    params = SamplingParams(best_of=3, max_tokens=4, seed=1, ignore_eos=True, logits_processors=[fails_at_once])
    (output,) = llm.generate([[5, 6]], params)
    assert output.outputs[0].finish_reason == "length"


def test_best_of_in_a_stream_or_of_logits_is_refused(llm: LLM, tiny: Tiny) -> None:
    with pytest.raises(RequestError, match=r"best_of=2 in a stream[\s\S]*generate\(\)"):
        llm.stream("def", SamplingParams(best_of=2))
    logits = LLM(tiny("llama"), **DEFAULTS, **{"sampling.logprobs_mode": "raw_logits"})
    with pytest.raises(RequestError, match=r"best_of=2 under sampling.logprobs_mode='raw_logits'"):
        logits.generate("def", SamplingParams(best_of=2))


# ---- wrong ones


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"best_of": 0}, "best_of=0"),
        ({"best_of": 2.0}, r"best_of=2\.0"),
        ({"best_of": 2, "n": 3}, "best_of=2 is below n=3"),
        ({"best_of": 2, "temperature": 0}, r"best_of=2 with temperature=0"),
        ({"allowed_token_ids": []}, r"allowed_token_ids=\(\)"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids=5"),
        ({"allowed_token_ids": "abc"}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": 5}, "bad_words=5"),
        ({"bad_words_token_ids": [5]}, "bad_words_token_ids"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids"),
        ({"bad_words_token_ids": [["a"]]}, "bad_words_token_ids"),
        ({"logits_processors": "f"}, "logits_processors"),
        ({"logits_processors": 7}, "logits_processors=7"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_refused_with_name_and_fix(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**wrong)
    assert caught.value.fix


@pytest.mark.parametrize("name", [one.name for one in attrs.fields(SamplingParams)])
def test_no_parameter_takes_what_is_none_of_its_values(name: str) -> None:
    with pytest.raises(RequestError, match=rf"{name}=<object object") as caught:
        SamplingParams(**{name: object()})
    assert name in caught.value.fix


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_flag_is_true_or_false_and_nothing_that_looks_like_it(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"{name}={value!r} is not allowed"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [384]}, r"allowed_token_ids names token 384[\s\S]*0 to 383"),
        ({"bad_words_token_ids": [[3, 384]]}, r"bad_words_token_ids names token 384[\s\S]*0 to 383"),
        ({"extra_args": {"no_repeat_ngram_size": 3}}, r"'no_repeat_ngram_size'[\s\S]*logits_processors"),
    ],
)
def test_what_this_engine_cannot_honour_is_refused_at_admission(
    params: dict[str, Any], message: str, tiny: Tiny, engines: Engines
) -> None:
    llm = engines(tiny("llama"))
    with pytest.raises(RequestError, match=message):
        llm.generate([[5]], SamplingParams(**params))
    everything_returned(llm)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("no_repeat_ngram", {"no_repeat_ngram_size": 2}),
        ("dry", {"dry_multiplier": 5.0, "dry_allowed_length": 1}),
        ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.001}),
        (
            "thinking_budget",
            {"thinking_token_budget": 3, "thinking_start_token_ids": [6], "thinking_end_token_ids": [9]},
        ),
    ],
)
def test_a_processor_that_the_configuration_names_acts_alike_in_every_mode(
    name: str, settings: dict[str, Any], tiny: Tiny, engines: Engines
) -> None:
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 25, "ignore_eos": True}
    prompts, found = [[5, 6, 7] * 4, [5, 6]], []
    for mode in MODES:
        llm = engines(tiny("llama"), **{"logits_processors": {name: {}}, **mode})
        found.append(tokens_of(llm, prompts, SamplingParams(extra_args=settings, **common)))
        assert found[-1] != tokens_of(llm, prompts, SamplingParams(**common))
    assert found[0] == found[1] == found[2]
