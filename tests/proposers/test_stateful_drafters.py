"""Drafters that keep a state of each row: what they hear of rows, and what becomes of states that are lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import add, random_prompts, run_all, tokens_of
from repository import SUPPORT

from slotline.core import LLM

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
PROMPTS = random_prompts((30, 25, 40, 10, 33, 28), seed=8)
NEXT = random_prompts((5, 12), seed=9)


def engine(tiny: Tiny, engines: Engines, drafter: str = "Reader", **settings: Any) -> LLM:
    """An engine with that drafter, which has heard nothing yet."""
    llm = engines(
        tiny("llama_deep"),
        **{
            "plugins.inline": (f"{SUPPORT / 'state_drafter.py'}:{drafter}",),
            "drafter.name": drafter.lower(),
            "drafter.tokens": 3,
            "drafter.adaptive": False,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 24,
            **settings,
        },
    )
    kind = reader(llm)
    kind.known.clear()
    kind.heard.clear()
    llm.engine.extension("drafts").drafting.counts.failures = 0
    return llm


def reader(llm: LLM) -> Any:
    return type(llm.engine.extension("drafts").drafting.drafter)


def check_states(llm: LLM, prompts: list[list[int]], texts: list[list[int]]) -> None:
    """Each state was the beginning of its request's text."""
    whole = {tuple(p): (*p, *t) for p, t in zip(prompts, texts, strict=True)}
    known = reader(llm).known
    assert len(known) > 20
    for prompt, text in known:
        assert text == whole[prompt][: len(text)]
        assert len(text) > len(prompt)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("memory", ["8MiB", "160KiB"])
def test_a_state_follows_chunks_fallen_drafts_and_preemption(
    tiny: Tiny, engines: Engines, memory: str, asynchronous: bool
) -> None:
    llm = engine(tiny, engines, memory=memory, **{"scheduler.async": asynchronous})
    expected = tokens_of(engines(tiny("llama_deep")), PROMPTS)
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    run_all(llm)
    assert [r.output_token_ids for r in requests] == expected
    counts, heard = llm.engine.extension("drafts").drafting.counts, reader(llm).heard
    assert counts.failures == 0, counts.last_failure
    assert counts.accepted < counts.proposed
    check_states(llm, PROMPTS, expected)
    preemptions = sum(r.metrics.num_preemptions for r in requests)
    assert (preemptions > 0) == (memory == "160KiB")
    assert [sum(what == one for what, _ in heard) for one in ("admit", "preempt", "release")] == [6, preemptions, 6]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_recovery_begins_all_states_again(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    llm = engine(tiny, engines, memory="8MiB", **{"scheduler.async": asynchronous})
    expected = tokens_of(engines(tiny("llama_deep")), PROMPTS)
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    for _ in range(12):
        llm.engine.step()
    running = [r for r in requests if r.row >= 0]
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> None:
            raise RuntimeError("in the middle")

        patched.setattr(llm.engine.runner, "launch", fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            llm.engine.step()
    before = len(reader(llm).heard)
    run_all(llm)
    assert [r.output_token_ids for r in requests] == expected
    told = {row for what, row in reader(llm).heard[before:] if what == "preempt"}
    assert told == {r.row for r in running} or len(told) == len(running)
    assert llm.engine.extension("drafts").drafting.counts.failures == 0
    check_states(llm, PROMPTS, expected)


def test_states_that_a_failure_left_undefined_are_released(tiny: Tiny, engines: Engines) -> None:
    """Their requests go on without drafts, and the next ones have drafts again."""
    llm = engine(tiny, engines, memory="8MiB")
    expected = tokens_of(engines(tiny("llama_deep")), PROMPTS)
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    for _ in range(12):
        llm.engine.step()
    reader(llm).fails = True
    llm.engine.step()
    counts, known = llm.engine.extension("drafts").drafting.counts, reader(llm).known
    assert counts.failures > 0
    assert counts.last_failure.endswith("observe raised RuntimeError: lost")
    known.clear()
    run_all(llm)
    assert [r.output_token_ids for r in requests] == expected
    lost = len(known)
    assert tokens_of(llm, NEXT) == tokens_of(engines(tiny("llama_deep")), NEXT)
    assert len(known) > lost
    texts = tokens_of(engines(tiny("llama_deep")), [*PROMPTS, *NEXT])
    check_states(llm, [*PROMPTS, *NEXT], texts)


def test_a_drafter_that_cannot_begin_again_loses_the_row(tiny: Tiny, engines: Engines) -> None:
    llm = engine(tiny, engines, "Deaf", memory="160KiB")
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    run_all(llm)
    assert [r.output_token_ids for r in requests] == tokens_of(engines(tiny("llama_deep")), PROMPTS)
    counts, heard = llm.engine.extension("drafts").drafting.counts, reader(llm).heard
    assert counts.failures > 0
    assert "raised RuntimeError: deaf" in counts.last_failure
    assert [what for what, _ in heard].count("release") == 6


def test_the_plan_says_that_states_are_not_captured(tiny: Tiny, engines: Engines) -> None:
    plan = engine(tiny, engines, memory="8MiB").plan
    (found,) = [setting for setting in plan.settings if setting.key == "drafter.graphs"]
    assert "drafter 'reader' keeps a state by row, and a graph knows no rows" in found.origin
