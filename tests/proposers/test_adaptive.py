"""Adaptive draft lengths: what is chosen under known costs and acceptance, and that no text depends on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

import numpy as np
import pytest
from engine_driver import GREEDY, random_prompts, tokens_of

from slotline.core import LLM, SamplingParams
from slotline.planner.plan import Planned
from slotline.proposers.speculation.draft_length_controller import LEARNING, PERIOD, PLAIN, DraftLengthController
from slotline.proposers.speculation.draft_timing import StepTimes
from slotline.registry.errors import NegotiationError
from slotline.testing.reference import drafter as reference
from tests.kv_cache.test_pages import planned
from tests.proposers.test_draft_tree import TREE
from tests.proposers.test_drafting import NGRAM, drafted_by, guided

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
K = 4
PROBABILISTIC = {"plugins.inline": (f"{reference.__file__}:probabilistic",), "drafter.name": "reference_pair_counts"}


def simulated(
    acceptance: list[float],
    *,
    base: float = 1.0,
    per_token: float = 0.0,
    draft: float = 0.0,
    noise: float = 0.05,
    uniform: bool = False,
    steps: int = 400,
    seed: int = 1,
    first: float = 1.0,
    behind: int = 0,
) -> tuple[np.ndarray, DraftLengthController]:
    """Drafts [steps, n] of each request in a run whose costs and acceptance are given.

    Args:
        first: how many times as long the first step of each kind takes.
        behind: steps that are under way when the next one is decided.
    """
    rng, control = Random(seed), DraftLengthController(len(acceptance), K, uniform=uniform)
    rows = np.arange(len(acceptance))
    for row in rows:
        control.admit(int(row))
    history, timed = list[np.ndarray](), list[tuple[int, float, bool]]()
    for _ in range(steps):
        drafts = np.zeros(len(rows), np.int64)
        if control.should_propose(rows):
            lengths = np.full(len(rows), K)
            control.proposed(lengths, draft * (1 + noise * rng.random()))
            drafts = control.lengths(rows, lengths)
        tokens = len(rows) + int(drafts.sum())
        seconds = (base + per_token * tokens) * (1 + noise * rng.random())
        drafted = bool(drafts.any())
        seconds *= 1.0 if any(kind == drafted for _, _, kind in timed) else first
        timed.append((tokens, seconds, drafted))
        if len(timed) > behind:
            *done, drafted = timed[-1 - behind]
            control.stepped(*done, drafted=drafted)
        stood = [next((i for i in range(n) if rng.random() > p), n) for n, p in zip(drafts, acceptance, strict=True)]
        some = drafts > 0
        if some.any():
            control.judged(rows[some], drafts[some], np.array(stood)[some])
        history.append(drafts)
    return np.array(history), control


def settled(acceptance: list[float], **more: Any) -> tuple[np.ndarray, DraftLengthController]:
    """Mean drafts of each request over the second half of a simulated run."""
    history, control = simulated(acceptance, **more)
    return history[len(history) // 2 :].mean(0), control


def test_all_drafts_are_taken_where_tokens_are_free() -> None:
    chosen, control = settled([0.8, 0.9])
    assert (chosen > 3.7).all()
    assert control.to_json()["acceptance"] == pytest.approx(0.85, abs=0.1)


def test_no_draft_is_taken_where_none_stands() -> None:
    chosen, control = settled([0.0, 0.0], per_token=0.1)
    assert (chosen < 0.2).all()
    assert control.steps_without > 100


def test_each_request_drafts_as_much_as_it_pays_for() -> None:
    chosen, _ = settled([0.95, 0.6, 0.02], base=1.0, per_token=0.12)
    assert chosen[0] > 3.3
    assert 0.4 < chosen[1] < 3.0
    assert chosen[2] < 0.4


def test_the_best_length_is_that_of_an_exhaustive_search() -> None:
    """One request: tokens (1 - p**(k+1)) / (1 - p) over seconds base + per_token * (1 + k), for k from 0."""
    for p, per_token in ((0.5, 0.05), (0.7, 0.2), (0.8, 0.1), (0.3, 0.3), (0.9, 0.3)):
        chosen, _ = settled([p], per_token=per_token, noise=0.0, steps=1200)
        best = max(range(K + 1), key=lambda k: (1 - p ** (k + 1)) / (1 - p) / (1 + per_token * (1 + k)))
        assert abs(chosen[0] - best) < 1.0, (p, per_token, best)


def test_a_batch_that_fills_the_device_drafts_less() -> None:
    few, _ = settled([0.6] * 2, base=1.0, per_token=0.02)
    many, _ = settled([0.6] * 60, base=0.1, per_token=0.02)
    assert few.mean() > many.mean() + 1.5


def test_a_drafter_that_costs_more_than_it_saves_is_not_asked() -> None:
    asked, _ = settled([0.5], draft=0.05)
    spared, control = settled([0.5], draft=3.0)
    assert asked.mean() > 2
    assert spared.mean() < 0.3
    assert control.to_json()["draft_seconds"] == pytest.approx(3.0, rel=0.1)


def test_a_uniform_batch_drafts_as_one() -> None:
    for acceptance in ([0.9, 0.9], [0.0, 0.05]):
        _, control = settled(acceptance, per_token=0.2, uniform=True)
        assert control.chosen[1:K].sum() == 0


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_a_good_drafter_loses_few_steps_to_learning(behind: int) -> None:
    for seed in range(8):
        history, _ = simulated([0.9], noise=0.3, steps=30, seed=seed, behind=behind)
        plain = np.flatnonzero(history[:, 0] == 0)
        assert len(plain) == PLAIN
        assert (np.diff(plain) > 2).all()  # spread out
        assert plain[-1] < LEARNING + PLAIN


@pytest.mark.spread(1)
@pytest.mark.parametrize("first", [1.0, 20.0])
@pytest.mark.parametrize(("p", "drafts"), [(0.9, True), (0.1, False)])
def test_no_noise_of_the_first_steps_decides_for_long(first: float, p: float, drafts: bool) -> None:
    """Steps that vary by half, of which the first of each kind may take as long as compiling takes."""
    for seed in range(20):
        history, _ = simulated([p] * 2, per_token=0.05, draft=0.2, noise=0.5, seed=seed, first=first, behind=1)
        chosen = history[2 * PERIOD : 3 * PERIOD].mean()
        assert chosen > 2.5 if drafts else chosen < 1.0, (seed, chosen)


@pytest.mark.parametrize(("p", "draft"), [(0.5, 0.5), (0.2, 0.05), (0.6, 0.8)])
def test_drafts_that_failed_by_chance_are_not_left_out_for_long(p: float, draft: float) -> None:
    """They pay, by a fifth to a third; a period's one look that fails must not decide for many."""
    for seed in range(6):
        history, _ = simulated([p], draft=draft, noise=0.1, steps=10 * PERIOD, seed=seed, behind=1)
        drafted = history[:, 0] > 0
        for begin in range(0, 7 * PERIOD, 8):
            assert drafted[begin : begin + 5 * PERIOD // 2].sum() > 4, (seed, begin)  # looks alone are at most 3
        assert drafted.mean() > 0.5, seed


def test_steps_that_cannot_be_measured_keep_their_drafts() -> None:
    """While prompts stand beside all decoding requests nothing is learned, and a good drafter must not lose by it."""
    control, rows = DraftLengthController(2, K), np.arange(2)
    asked = [control.should_propose(rows) for _ in range(10 * PERIOD)]
    assert 1 <= asked[: PERIOD // 2].count(False) <= 8
    assert asked.count(False) < 0.08 * len(asked)


def test_acceptance_that_changes_is_noticed() -> None:
    """A request that starts to repeat itself after 400 steps gets drafts again."""
    rng, control, rows = Random(2), DraftLengthController(1, K), np.array([0])
    taken = []
    for step in range(1400):
        drafts = np.zeros(1, np.int64)
        if control.should_propose(rows):
            control.proposed(np.array([K]), 0.01)
            drafts = control.lengths(rows, np.array([K]))
        control.stepped(1 + int(drafts[0]), 1 + 0.2 * (1 + drafts[0]), drafted=bool(drafts[0]))
        p = 0.0 if step < 400 else 0.9
        if drafts[0]:
            stood = next((i for i in range(drafts[0]) if rng.random() > p), int(drafts[0]))
            control.judged(rows, drafts, np.array([stood]))
        taken.append(int(drafts[0]))
    assert np.mean(taken[200:400]) < 0.3
    assert np.mean(taken[400 + 6 * PERIOD :]) > 2


def test_texts_do_not_depend_on_it(tiny: Tiny, engines: Engines) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **{**NGRAM, "drafter.adaptive": "auto"})
    prompts = random_prompts((5, 40, 17, 1, 30, 12), seed=3)
    for params in (GREEDY, SamplingParams(temperature=0.9, seed=11, max_tokens=20, ignore_eos=True)):
        expected = tokens_of(plain, prompts, params)
        for right in (0.0, 0.9):
            with drafted_by(llm, guided(prompts, expected, right)):
                for _ in range(3):
                    assert tokens_of(llm, prompts, params) == expected
    decided = llm.engine.extension("drafts").drafting.to_json()["adaptive"]
    assert sum(decided["chosen"]) > 0
    assert decided["step_seconds"] + decided["step_seconds_per_token"] > 0


def decision(found: Planned) -> tuple[str, str, str, bool]:
    (setting,) = [setting for setting in found.plan.settings if setting.key == "drafter.adaptive"]
    assert "drafter.adaptive" in found.plan.explain()
    assert found.adaptive == (setting.resolved == "true")
    return setting.asked, setting.resolved, setting.origin, setting.explicit


def test_auto_says_why(tiny: Tiny) -> None:
    path, look_up = tiny("llama"), {"drafter.name": "ngram"}
    assert decision(planned(path, **look_up)) == ("auto", "true", "auto: nothing forbids it", False)
    asked, resolved, _, explicit = decision(planned(path, **NGRAM))
    assert (asked, resolved, explicit) == ("false", "false", True)
    asked, resolved, origin, _ = decision(planned(path, **PROBABILISTIC))
    assert (asked, resolved) == ("auto", "false")
    assert "'reference_pair_counts' gives probabilities: a seed's text would depend" in origin
    trees = {**TREE, "drafter.adaptive": "auto"}
    asked, resolved, origin, _ = decision(planned(path, **trees, **{"attention.backend": "torch"}))
    assert (asked, resolved) == ("auto", "false")
    assert "'tree': its trees are verified whole" in origin
    chains = {"attention.backend": "cpu", "batch_invariant": True}
    assert decision(planned(path, **trees, **chains))[1] == "true"
    assert all(setting.key != "drafter.adaptive" for setting in planned(path).plan.settings)


def test_what_is_asked_for_is_done_or_refused(tiny: Tiny) -> None:
    path, asked = tiny("llama"), {"drafter.adaptive": True}
    assert decision(planned(path, **PROBABILISTIC, **asked))[1] == "true"
    with pytest.raises(
        NegotiationError, match=r"drafter.adaptive = true .*'tree': its trees are verified whole"
    ) as found:
        planned(path, **{**TREE, **asked}, **{"attention.backend": "torch"})
    assert found.value.fix == 'set drafter.adaptive to "auto" or false'
    with pytest.raises(NegotiationError, match=r"drafter.adaptive = true .*there is no drafter"):
        planned(path, **asked)


def test_lengths_are_chosen_where_the_plan_says_so(tiny: Tiny, engines: Engines) -> None:
    drafting = engines(tiny("llama"), **{**NGRAM, "drafter.adaptive": "auto"}).engine.extension("drafts").drafting
    assert drafting is not None
    assert drafting.control is not None
    for settings in (NGRAM, PROBABILISTIC, {**TREE, "drafter.adaptive": "auto"}):
        drafting = engines(tiny("llama"), **settings).engine.extension("drafts").drafting
        assert drafting is not None
        assert drafting.control is None


def test_what_a_grammar_forces_says_nothing_of_the_drafter(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines(tiny("llama"), **{**NGRAM, "drafter.adaptive": True})
    drafting, control = llm.engine.extension("drafts").drafting, DraftLengthController(8, K)
    assert drafting is not None
    monkeypatch.setattr(drafting, "control", control)
    before = control.to_json()["acceptance"]
    for forced in (True, False):
        drafting.drafts.write(np.array([0, 1]), np.array([[5, 6]] * 2), np.array([2, 2]), forced=forced)
        drafting.count(np.repeat([0, 1], 3), np.tile(np.arange(3), 2), np.ones(6, bool), np.full(6, 2))
        assert (control.to_json()["acceptance"] == before) == forced


def test_a_step_is_timed_without_its_proposal_and_taken_once_it_is_over() -> None:
    times, lengths = StepTimes(), np.array([3, 3])
    times.begin(10, drafted=True, decodes=True)
    sleep(0.02)
    times.record_computed()
    sleep(0.005)
    times.proposed(lengths)
    assert list(times.take()) == []  # the drafts may still be counted
    times.begin(2, drafted=False, decodes=True)
    (step,) = times.take()
    assert (step.num_tokens, step.drafted, step.lengths is lengths) == (10, True, True)
    assert step.seconds is not None
    assert step.draft_seconds is not None
    assert 0.005 <= step.draft_seconds < 0.018 < step.seconds < 0.2
    times.begin(1, drafted=False, decodes=False)  # the one before failed
    (lost,) = times.take()
    assert lost.seconds is None
    assert lost.draft_seconds is None
