"""The logits processors that ship: each equals transformers' own or its definition, at every draft position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_cases import MAX_MODEL_LEN, VOCAB_SIZE, Asked, asked, batch_of, processed, some_logits, tokens
from transformers.generation import logits_process as hf

from slotline.plugins.logits_processors.row_values import RowValues
from slotline.plugins.logits_processors.thinking_budget.options import ThinkingBudgetOptions

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(19, 108)]
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
INF = float("inf")


def by_transformers(processor: Any, request: Asked, logits: torch.Tensor) -> torch.Tensor:
    """One row [VOCAB_SIZE] behind a processor of transformers."""
    return processor(torch.tensor([request.history]), logits[None].clone())[0]


# ---- what processors are given


@given(requests=asked(st.just({})), width=st.integers(1, MAX_MODEL_LEN))
@quick
def test_the_tail_of_a_batch_is_the_end_of_each_history_with_its_drafts(requests: list[Asked], width: int) -> None:
    batch = batch_of(requests, list(range(len(requests))))
    whole = batch.tail()
    assert batch.lengths.tolist() == [len(one.history) for one in requests]
    for i, one in enumerate(requests):
        padded = [-1] * MAX_MODEL_LEN + one.history
        assert batch.tail(width)[i].tolist() == padded[-width:]
        assert whole[i].tolist() == padded[-whole.shape[1] :]


def test_values_by_row_are_taken_in_the_order_of_the_rows_and_dropped_alone() -> None:
    values = RowValues(4, width=2)
    values.set(3, [[1, 2], [3, 4]])
    values.set(0, [[5, 6]])
    entries, found = values.take(np.array([0, 2, 3, 0]))
    assert entries.tolist() == [0, 2, 2, 3]
    assert found.tolist() == [[5, 6], [1, 2], [3, 4], [5, 6]]
    values.drop(3)
    assert values.take(np.array([3, 0]))[1].tolist() == [[5, 6]]
    values.drop(0)
    assert values.take(np.array([3, 0]))[1].shape == (0, 2)


# ---- against transformers


@given(requests=asked(st.fixed_dictionaries({"no_repeat_ngram_size": st.integers(0, 4)})))
@quick
def test_no_repeat_ngram_equals_transformers(requests: list[Asked]) -> None:
    logits = some_logits(len(requests))
    found = processed("no_repeat_ngram", requests, logits)
    for i, one in enumerate(requests):
        size = one.settings["no_repeat_ngram_size"]
        want = by_transformers(hf.NoRepeatNGramLogitsProcessor(size), one, logits[i]) if size else logits[i]
        torch.testing.assert_close(found[i], want, rtol=0, atol=0)


words = st.lists(tokens(1, 4), min_size=1, max_size=4)


@given(requests=asked(st.fixed_dictionaries({"bad_words_token_ids": words})))
@quick
def test_bad_words_equal_transformers(requests: list[Asked]) -> None:
    logits = some_logits(len(requests))
    found = processed("bad_words", requests, logits)
    for i, one in enumerate(requests):
        theirs = hf.NoBadWordsLogitsProcessor(one.settings["bad_words_token_ids"])
        torch.testing.assert_close(found[i], by_transformers(theirs, one, logits[i]), rtol=0, atol=0)


@given(requests=asked(st.fixed_dictionaries({"allowed_token_ids": tokens(1, 5, VOCAB_SIZE)})))
@quick
def test_allowed_tokens_equal_transformers(requests: list[Asked]) -> None:
    logits = some_logits(len(requests))
    found = processed("allowed_token_ids", requests, logits)
    for i, one in enumerate(requests):
        allowed = one.settings["allowed_token_ids"]
        theirs = hf.PrefixConstrainedLogitsProcessor(lambda *_, allowed=allowed: allowed, num_beams=1)
        torch.testing.assert_close(found[i], by_transformers(theirs, one, logits[i]), rtol=0, atol=0)


biases = st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.integers(-9, 9).map(float), min_size=1, max_size=4)


@given(requests=asked(st.fixed_dictionaries({"logit_bias": biases})))
@quick
def test_a_bias_equals_transformers(requests: list[Asked]) -> None:
    logits = some_logits(len(requests))
    found = processed("logit_bias", requests, logits)
    for i, one in enumerate(requests):
        theirs = hf.SequenceBiasLogitsProcessor({(token,): bias for token, bias in one.settings["logit_bias"].items()})
        torch.testing.assert_close(found[i], by_transformers(theirs, one, logits[i]))


@given(requests=asked(st.fixed_dictionaries({"min_tokens": st.integers(0, 12), "stop_token_ids": tokens(0, 3)})))
@quick
def test_a_minimum_equals_transformers(requests: list[Asked]) -> None:
    logits = some_logits(len(requests))
    found = processed("min_tokens", requests, logits)
    for i, one in enumerate(requests):
        stops = sorted({2, *one.settings["stop_token_ids"]})
        minimum = one.settings["min_tokens"]
        want = logits[i]
        if minimum:
            theirs = hf.MinNewTokensLengthLogitsProcessor(len(one.prompt), minimum, torch.tensor(stops))
            want = by_transformers(theirs, one, logits[i])
        torch.testing.assert_close(found[i], want, rtol=0, atol=0)


# ---- against their definitions


def naive_penalties(one: Asked, logits: torch.Tensor) -> torch.Tensor:
    """Token by token: repetition over all of the history, then frequency and presence over what follows the prompt."""
    result = logits.clone()
    for token in range(VOCAB_SIZE):
        if token in one.history:
            factor = one.settings["repetition_penalty"]
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        count = (one.output + one.drafts).count(token)
        result[token] -= one.settings["frequency_penalty"] * count
        result[token] -= one.settings["presence_penalty"] * (count > 0)
    return result


penalties = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.4, -1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.9, -0.5]),
    }
)


@given(requests=asked(penalties))
@quick
def test_penalties_are_their_formulas(requests: list[Asked]) -> None:
    logits = some_logits(len(requests))
    logits[:, 7] = -INF
    found = processed("penalties", requests, logits)
    for i, one in enumerate(requests):
        torch.testing.assert_close(found[i], naive_penalties(one, logits[i]))


def naive_dry(one: Asked, logits: torch.Tensor) -> torch.Tensor:
    """For each token: the longest end of the history that it followed before, found by comparing lists."""
    multiplier, base, allowed, last_n, breakers = (
        one.settings[f"dry_{name}"]
        for name in ("multiplier", "base", "allowed_length", "penalty_last_n", "sequence_breaker_ids")
    )
    history = one.history if last_n < 0 else one.history[max(0, len(one.history) - last_n) :]
    result = logits.clone()
    for token in set(history) - set(breakers):
        longest = 0
        for place in [i for i in range(len(history)) if history[i] == token]:
            for length in range(1, place + 1):
                passage = history[place - length : place]
                if passage == history[-length:] and not set(passage) & set(breakers):
                    longest = max(longest, length)
        if longest >= allowed:
            result[token] -= multiplier * base ** (longest - allowed)
    return result


dry = st.fixed_dictionaries(
    {
        "dry_multiplier": st.sampled_from([0.0, 0.8, 2.0]),
        "dry_base": st.sampled_from([1.0, 1.75]),
        "dry_allowed_length": st.integers(1, 3),
        "dry_penalty_last_n": st.sampled_from([-1, 0, 5, 11]),
        "dry_sequence_breaker_ids": tokens(0, 2),
    }
)


@given(requests=asked(dry))
@quick
def test_dry_lowers_what_would_go_on_repeating(requests: list[Asked]) -> None:
    logits = some_logits(len(requests))
    found = processed("dry", requests, logits)
    for i, one in enumerate(requests):
        torch.testing.assert_close(found[i], naive_dry(one, logits[i]))


def test_dry_stays_finite_on_a_passage_without_end() -> None:
    request = Asked({"dry_multiplier": 1.0, "dry_base": 4.0}, [3] * 30, [], [])
    assert processed("dry", [request], some_logits(1)).isfinite().all()


def naive_xtc(logits: torch.Tensor, threshold: float) -> torch.Tensor:
    likely = [token for token, p in enumerate(logits.softmax(-1).tolist()) if p >= threshold]
    result = logits.clone()
    for token in likely:
        if logits[token] > logits[likely].min():
            result[token] = -INF
    return result


@given(threshold=st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5]), seed=st.integers(0, 10**6))
@quick
def test_xtc_bans_all_likely_tokens_but_the_least_likely(threshold: float, seed: int) -> None:
    logits = some_logits(1, seed)
    found = processed("xtc", [Asked({"xtc_probability": 1.0, "xtc_threshold": threshold}, [1], [], [])], logits)
    torch.testing.assert_close(found[0], naive_xtc(logits[0], threshold), rtol=0, atol=0)


def test_xtc_acts_as_often_as_its_probability_says_by_seed_and_position() -> None:
    logits = torch.tensor([[2.0, 2.0, 1.0] + [-9.0] * (VOCAB_SIZE - 3)])

    def acts(seed: int, length: int) -> bool:
        asked = Asked({"xtc_probability": 0.3, "xtc_threshold": 0.1, "seed": seed}, [1] * length, [], [])
        return not torch.equal(processed("xtc", [asked], logits), logits)

    by_seed = [acts(seed, 3) for seed in range(400)]
    by_position = [acts(7, length) for length in range(1, MAX_MODEL_LEN)]
    assert 0.2 < np.mean(by_seed) < 0.4
    assert 0 < sum(by_position) < len(by_position)
    assert by_seed == [acts(seed, 3) for seed in range(400)]


def naive_budget(one: Asked, logits: torch.Tensor) -> torch.Tensor:
    """Reads the history from left to right."""
    start, end, budget = [1], one.settings["thinking_end_token_ids"], one.settings["thinking_token_budget"]
    history, begun = one.history, None
    for i in range(len(history)):
        if history[i : i + 1] == start:
            begun = i + 1
        elif begun is not None and i + 1 - begun >= len(end) and history[i + 1 - len(end) : i + 1] == end:
            begun = None
    if begun is None or len(history) - begun < budget:
        return logits
    inside = history[begun:]
    length = max(n for n in range(len(end)) if n == 0 or inside[-n:] == end[:n])
    result = torch.full_like(logits, -INF)
    result[end[length]] = logits[end[length]]
    return result


budget = st.fixed_dictionaries(
    {
        "thinking_token_budget": st.integers(0, 5),
        "thinking_start_token_ids": st.just([1]),
        "thinking_end_token_ids": st.sampled_from([[2], [2, 3], [3, 3, 2]]),
    }
)


@given(requests=asked(budget))
@quick
def test_thinking_ends_when_its_budget_is_spent(requests: list[Asked]) -> None:
    logits = some_logits(len(requests))
    found = processed("thinking_budget", requests, logits)
    for i, one in enumerate(requests):
        torch.testing.assert_close(found[i], naive_budget(one, logits[i]), rtol=0, atol=0)


def test_the_marks_of_thinking_may_stand_in_the_configuration() -> None:
    logits = some_logits(1)
    request = Asked({"thinking_token_budget": 1}, [8, 7], [4], [])
    options = ThinkingBudgetOptions(start_token_ids=(8, 7), end_token_ids=(9,))
    assert processed("thinking_budget", [request], logits, options).argmax() == 9
    assert torch.equal(processed("thinking_budget", [Asked(request.settings, [8], [4], [])], logits, options), logits)
