"""Steps that overlap beside a drafter: launched before it is known which drafts stood, and nothing shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import head_folders
import numpy as np
import pytest
from device_drafter import Foreseeing
from engine_driver import add, random_prompts, recorded, run_all, tokens_of
from head_folders import expected_of
from repository import SUPPORT

from slotline.core import LLM, SamplingParams
from slotline.proposers.speculation.async_spec_decode import Proposal
from slotline.proposers.speculation.hidden_states import HiddenStates
from slotline.registry.errors import NegotiationError
from tests.engine.test_asynchronous import PARAMS, seen
from tests.engine.test_engine_equality import pool_of

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = random_prompts([3, 33, 17, 30, 1, 25])
SMALL: dict[str, Any] = {"block_size": 4, "scheduler.max_batched_tokens": 24}
FORESEEING: dict[str, Any] = {
    "plugins.inline": (f"{SUPPORT / 'device_drafter.py'}:Foreseeing",),
    "drafter.name": "foreseeing",
    "drafter.tokens": 3,
    "drafter.adaptive": False,
}
OVERLAPPED: dict[str, Any] = {**FORESEEING, "scheduler.async": True}


@pytest.fixture(autouse=True)
def nothing_foreseen() -> Iterator[None]:
    yield
    Foreseeing.texts.clear()
    Foreseeing.right = 70


def foresee(llm: LLM, prompts: list[list[int]], texts: list[list[int]]) -> None:
    """Tell the engine's drafter what will come."""
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    type(drafting.drafter).texts = {tuple(p): p + t for p, t in zip(prompts, texts, strict=True)}  # type: ignore[attr-defined]


def accepted(llm: LLM) -> int:
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    assert drafting.counts.failures == 0, drafting.counts.last_failure
    return drafting.counts.accepted


# ---- the same tokens


@pytest.mark.spread(7)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.behaviour(20, 55, 88, 107, 108, 109, 116)
def test_outputs_equal_those_without_drafts_one_step_after_the_other(
    params: SamplingParams, backend: str, tiny: Tiny, engines: Engines
) -> None:
    path = tiny("llama_deep")
    plain, llm = engines(path, **SMALL), engines(path, **SMALL, **OVERLAPPED, backend=backend)
    expected = plain.generate(PROMPTS, params)
    foresee(llm, PROMPTS, [o.outputs[0].token_ids for o in expected])
    before = accepted(llm)
    for _ in range(2):  # the second time with cached prefixes
        assert seen(llm.generate(PROMPTS, params)) == seen(expected)
    assert accepted(llm) - before > 10


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["foreseeing", "draft_model"])
def test_requests_that_are_about_to_end_leave_a_batch_uniform(
    kind: str, asynchronous: bool, tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where verifying batches are captured, each request has as many drafts as the others, near its end too."""
    path = tiny("llama_deep")
    settings = (
        FORESEEING
        if kind == "foreseeing"
        else {"drafter.name": kind, "drafter.path": str(path), "drafter.adaptive": False}
    )
    prompts = random_prompts([3, 12, 17, 9], seed=2)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 14, 30, 40)]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = [output.outputs[0].token_ids for output in engines(path).generate(inputs, params)]
    llm = engines(path, **{**settings, "drafter.tokens": 3, "scheduler.async": asynchronous})
    if kind == "foreseeing":
        foresee(llm, prompts, expected)
    drafting, schedule, counts = (
        llm.engine.extension("drafts").drafting,
        llm.engine.scheduler.schedule,
        list[list[int]](),
    )
    assert drafting is not None
    monkeypatch.setattr(drafting, "uniform", True)

    def record() -> Any:
        made = schedule()
        counts.append(made.num_scheduled.tolist())
        return made

    monkeypatch.setattr(llm.engine.scheduler, "schedule", record)
    assert [output.outputs[0].token_ids for output in llm.generate(inputs, params)] == expected
    assert drafting.counts.failures == 0
    assert drafting.counts.accepted > 20
    verifying = [each for each in counts[1:] if each]
    assert len(verifying) > 9
    assert all(set(each) in ({1}, {4}) for each in verifying), verifying


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", ["mistral", "gemma3", "deepseek_v3", "gpt_oss", "llama4"])
def test_windows_chunks_and_latents_are_served_too(family: str, tiny: Tiny, engines: Engines) -> None:
    path = tiny(family)
    llm, expected = engines(path, **SMALL, **OVERLAPPED), tokens_of(engines(path), PROMPTS)
    foresee(llm, PROMPTS, expected)
    assert tokens_of(llm, PROMPTS) == expected
    assert accepted(llm) > 20


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", ["mamba2", "bamba", "qwen3_next", "lfm2"])
def test_states_go_back_to_what_stood(family: str, tiny: Tiny, engines: Engines) -> None:
    path = tiny(family)
    llm = engines(path, **OVERLAPPED, max_num_batched_tokens=32)
    expected = tokens_of(engines(path), PROMPTS)
    foresee(llm, PROMPTS, expected)
    before = accepted(llm)
    for _ in range(2):  # the second time from checkpoints
        assert tokens_of(llm, PROMPTS) == expected
    assert accepted(llm) - before > 50


@pytest.mark.behaviour(16)
def test_states_of_preempted_requests_begin_again(tiny: Tiny, engines: Engines) -> None:
    path, prompts = tiny("bamba"), random_prompts([30, 25, 20, 28, 33], seed=4)
    settings = {**OVERLAPPED, "max_num_batched_tokens": 40, "drafter.tokens": 2}
    expected = tokens_of(engines(path), prompts)
    llm = engines(path, **settings)
    foresee(llm, prompts, expected)
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
    for step in range(400):
        if not llm.engine.has_work:
            break
        if step % 5 == 4 and llm.engine.scheduler.running:  # as where blocks run out
            llm.engine.scheduler._preempt_last()
        llm.engine.step()
    assert sum(request.metrics.num_preemptions for request in requests) > 3
    assert [request.output_token_ids for request in requests] == expected


@pytest.mark.spread(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("adaptive", [False, True], ids=["all", "adaptive"])
@pytest.mark.behaviour(16, 33, 40)
def test_requests_that_come_and_go_at_random_give_the_same_tokens(
    seed: int, adaptive: bool, tiny: Tiny, engines: Engines
) -> None:
    path, rng = tiny("llama_deep"), Random(seed)
    prompts = random_prompts([rng.randrange(1, 40) for _ in range(40)], seed=seed)
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.8]),
            seed=i,
            max_tokens=rng.randrange(1, 24),
            stop_token_ids=list(range(3, 30)) if rng.random() < 0.3 else None,
            repetition_penalty=rng.choice([1.0, 1.0, 1.4]),
        )
        for i in range(40)
    ]
    expected = [o.outputs[0].token_ids for o in engines(path, **SMALL).generate(prompts, params)]
    settings = {**SMALL, **OVERLAPPED, "drafter.adaptive": adaptive}
    llm = engines(path, **settings, memory=pool_of(30, 4), max_num_seqs=5)
    foresee(llm, prompts, expected)
    given, aborted, waiting = {}, {}, list(range(40))
    with recorded(llm) as steps:
        while waiting or llm.engine.has_work:
            for _ in range(rng.randrange(3)):
                if waiting:
                    index = waiting.pop(0)
                    given[index] = add(llm, str(index), prompts[index], params[index])
            if rng.random() < 0.08 and llm.engine.requests:
                name = rng.choice(list(llm.engine.requests))
                aborted[int(name)] = llm.engine.abort(name)
            llm.engine.step()
    assert sum(len(step.preempted) for step in steps) > 0
    assert 0 < len(aborted) < 30
    for index, request in given.items():
        tokens = request.output_token_ids
        assert tokens == expected[index][: len(tokens)]
        assert index in aborted or tokens == expected[index]
    assert accepted(llm) > 50


@pytest.mark.spread(2)
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_a_text_ends_at_its_limit(limit: int, tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama_deep")
    params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
    llm = engines(path, **SMALL, **OVERLAPPED)
    foresee(llm, PROMPTS, tokens_of(engines(path), PROMPTS))
    assert tokens_of(llm, PROMPTS, params) == tokens_of(engines(path), PROMPTS, params)
    long = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
    expected = tokens_of(engines(path), PROMPTS, long)
    foresee(llm, PROMPTS, expected)
    assert tokens_of(llm, PROMPTS, long) == expected
    assert [len(p) + len(t) for p, t in zip(PROMPTS, expected, strict=True)] == [64] * len(PROMPTS)


def test_what_a_drafter_says_wrongly_costs_drafts_alone(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama_deep")
    llm, expected = engines(path, **SMALL, **OVERLAPPED), tokens_of(engines(path), PROMPTS)
    foresee(llm, PROMPTS, [[token + 9000 * (i % 5 == 0) for i, token in enumerate(text)] for text in expected])
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    assert tokens_of(llm, PROMPTS) == expected
    assert drafting.counts.failures > 0
    assert "outside the vocabulary" in drafting.counts.last_failure
    drafting.counts.failures = 0
    original = drafting.drafter.propose

    def failing(batch: Any) -> Any:
        raise RuntimeError("no idea")

    drafting.drafter.propose = failing  # type: ignore[method-assign]
    try:
        assert tokens_of(llm, PROMPTS) == expected
    finally:
        drafting.drafter.propose = original  # type: ignore[method-assign]
    assert "no idea" in drafting.counts.last_failure
    drafting.counts.failures = 0


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama_deep")
    llm = engines(path, **OVERLAPPED)
    foresee(llm, PROMPTS[:1], tokens_of(engines(path), PROMPTS[:1]))
    events: list[str] = []
    overlap, runner = llm.engine.extension("drafts").overlap, llm.engine.runner
    assert overlap is not None
    head = runner.head
    watched = [(runner, "launch"), (head, "start"), (head, "finish"), (overlap, "propose"), (overlap, "place")]
    originals = [getattr(owner, name) for owner, name in watched]

    def noted(name: str, original: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            events.append(name)
            return original(*arguments)

        return call

    for (owner, name), original in zip(watched, originals, strict=True):
        setattr(owner, name, noted(name, original))
    try:
        llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    finally:
        for owner, name in watched:
            delattr(owner, name)
    step = ["launch", "finish", "place", "start", "propose"]
    assert events[:3] == ["launch", "start", "propose"]
    assert events[3:13] == step * 2


# ---- drafters that are shipped


def drafts_placed(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """From now on, all tokens that were known, and the drafts that stand behind them."""
    overlap, rows, found = llm.engine.extension("drafts").overlap, llm.engine.rows, list[tuple[list[int], list[int]]]()
    assert overlap is not None
    original = type(overlap).place

    def place(proposal: Proposal) -> None:
        original(overlap, proposal)
        for row in proposal.rows[rows.generation[proposal.rows] == proposal.generations].tolist():
            known, count = int(rows.num_tokens[row]), int(rows.num_spec_tokens[row])
            text = rows.token_ids[row, : known + count].tolist()
            found.append((text[:known], text[known:]))

    overlap.place = place  # type: ignore[method-assign]
    return found


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16}], ids=["whole", "chunks"])
@pytest.mark.behaviour(64, 120, 160)
def test_a_head_drafts_what_it_drafts_without_a_cache(
    kind: str, settings: dict[str, Any], tiny: Tiny, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, head = tiny("llama_deep"), head_folders.build(tmp_path / "head", tiny("llama_deep"), kind)
    llm = engines(
        path,
        **{
            "drafter.name": kind,
            "drafter.path": str(head),
            "drafter.tokens": 4,
            "drafter.adaptive": False,
            "memory": "8MiB",
        },
        **{"scheduler.async": True, **settings},
    )
    # Picking states by the host's places would wait for the forward pass of the step behind.
    monkeypatch.delattr(HiddenStates, "take")
    prompts, found = random_prompts((5, 40, 17, 2, 30, 12), seed=3), drafts_placed(llm)
    assert tokens_of(llm, prompts) == tokens_of(engines(path), prompts)
    assert accepted(llm) >= 0
    expected = expected_of(head, path, kind)
    found.sort(key=lambda each: -len(each[0]))  # what is computed for a text holds for all that it begins with
    assert len(found) > 50
    assert all(drafts == expected.drafts(tokens, len(drafts)) for tokens, drafts in found if drafts)


@pytest.mark.parametrize("memory", ["8MiB", f"{2 * 4 * 30}KiB"], ids=["room", "preempted"])
def test_a_draft_model_that_is_the_model_itself_is_right(memory: str, tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama_deep")
    prompts = random_prompts((30, 25, 40, 10, 33, 28), seed=8)
    llm = engines(
        path,
        **{
            "drafter.name": "draft_model",
            "drafter.path": str(path),
            "drafter.tokens": 4,
            "drafter.adaptive": False,
            "scheduler.async": True,
        },
        memory=memory,
        block_size=4,
    )
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
    run_all(llm)
    assert [request.output_token_ids for request in requests] == tokens_of(engines(path), prompts)
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    assert drafting.counts.failures == 0
    share = drafting.counts.accepted / drafting.counts.proposed
    preempted = sum(request.metrics.num_preemptions for request in requests)
    if memory == "8MiB":
        assert (share, preempted) == (1, 0)
    else:
        assert preempted > 0
        assert share > 0.8  # where blocks are short, the last drafts see a hole


@pytest.mark.spread(0, slow=1)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_the_shipped_heads_draft_as_well_as_in_steps_that_do_not_overlap(kind: str) -> None:
    prompts = ["def main(", "import os\n", "class Foo(", "for i in range(", "try:\n"]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    shared = {
        "max_model_len": 96,
        "max_num_seqs": 4,
        "drafter.name": kind,
        "drafter.tokens": 3,
        "drafter.adaptive": False,
    }
    shared |= {"observability.check_integrity": True, "observability.progress": False}
    texts, shares = [], []
    for asynchronous in (False, True):
        llm = LLM(device="cpu", **shared, **{"scheduler.async": asynchronous})
        texts.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
        assert llm.engine.extension("drafts") is not None
        counts = llm.engine.extension("drafts").drafting.counts
        shares.append(counts.accepted / counts.proposed)
    assert texts[0] == texts[1]
    assert np.isclose(*shares, rtol=0.1)


# ---- who decides


def test_auto_says_why_and_a_refusal_names_all(tiny: Tiny, tmp_path: Path) -> None:
    def setting(**settings: Any) -> Any:
        plan = LLM(tiny("llama_deep"), device="cpu", **{"observability.progress": False}, **settings).plan
        return next(s for s in plan.settings if s.key == "scheduler.async")

    chosen = setting(**OVERLAPPED)
    assert (chosen.asked, chosen.resolved) == ("true", "true")
    assert "'foreseeing' proposes there" in chosen.origin
    assert (found := setting(**FORESEEING)).resolved == "false"
    assert "cores" in found.origin
    assert (found := setting(**{"drafter.name": "ngram"})).resolved == "false"
    assert "'ngram': drafts are made from the step before's tokens (on_device" in found.origin
    with pytest.raises(NegotiationError, match="backend 'flex' plans with exact lengths") as caught:
        setting(**OVERLAPPED, backend="flex")
    assert 'set scheduler.async to "auto" or false' in str(caught.value)
    lookup = {"drafter.name": "foreseeing", "scheduler.async": True, "drafter.tokens": 2}
    with pytest.raises(NegotiationError, match="'foreseeing': it reads the text on the host"):
        setting(**lookup, **{"plugins.inline": (f"{SUPPORT / 'device_drafter.py'}:Undecided",)})
    for name, why in (("medusa_tree", "on_device is not declared"), ("grammar", "on_device is not declared")):
        with pytest.raises(NegotiationError, match=f"drafter.name = '{name}'.*{why}"):
            setting(**{"drafter.name": name, "scheduler.async": True})
