"""Several threads, and callbacks, on one engine: each caller gets its own results, and aborted requests return."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from attrs import evolve
from engine_driver import GREEDY, add, random_prompts, tokens_of
from tiny_engines import everything_returned

from slotline.core import LLM, BeamSearchParams, PoolingParams, SamplingParams
from slotline.registry.errors import RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = random_prompts([3, 30, 17, 9, 25, 5])
SHORT = evolve(GREEDY, max_tokens=8)
WAIT = 120
"""Seconds after which a thread counts as hanging."""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_threads_that_share_an_engine_each_get_their_own_texts(
    asynchronous: bool, tiny: Tiny, engines: Engines
) -> None:
    llm = engines(tiny("llama"), **{"scheduler.async": asynchronous})
    expected, together = tokens_of(llm, PROMPTS, SHORT), Barrier(6)

    def generate(index: int) -> list[list[int]]:
        together.wait(WAIT)
        return [tokens_of(llm, [PROMPTS[index]], SHORT)[0] for _ in range(3)]

    def stream(index: int) -> list[list[int]]:
        together.wait(WAIT)
        return [list(llm.stream({"prompt_token_ids": PROMPTS[index]}, SHORT))[-1].outputs[0].token_ids] * 3

    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(stream if index % 2 else generate, index) for index in range(6)]
        assert [call.result(WAIT) for call in calls] == [[text] * 3 for text in expected]
    everything_returned(llm)


def test_threads_get_their_own_embeddings(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), task="embed")
    params = PoolingParams()
    expected = [output.outputs.data for output in llm.embed(PROMPTS[:4], params) if output.outputs is not None]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: llm.embed([prompt], params)[0], PROMPTS[:4]))
    for output, wanted in zip(found, expected, strict=True):
        assert output.outputs is not None
        torch.testing.assert_close(output.outputs.data, wanted)


def test_a_thread_that_comes_later_need_not_wait_for_the_end_of_the_call_before_it(
    tiny: Tiny, engines: Engines
) -> None:
    llm, begun, ended = engines(tiny("llama")), Event(), Event()
    seen: list[bool] = []

    def watch(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        begun.set()
        seen.append(ended.is_set())
        return logits

    def short() -> list[list[int]]:
        assert begun.wait(WAIT)
        found = tokens_of(llm, PROMPTS[:1], evolve(SHORT, max_tokens=2))
        ended.set()
        return found

    expected = tokens_of(llm, PROMPTS[:1], evolve(SHORT, max_tokens=2))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(short)
        llm.generate([PROMPTS[3]], evolve(SHORT, max_tokens=50, logits_processors=[watch]))
        assert call.result(WAIT) == expected
    assert (seen[0], seen[-1]) == (False, True)


def test_a_mistake_in_one_thread_leaves_the_others_alone(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    expected = tokens_of(llm, PROMPTS[:1], SHORT)

    def wrong() -> None:
        for _ in range(5):
            with pytest.raises(RequestError):
                llm.generate([[10**6]], SHORT)
            with pytest.raises(RequestError):
                llm.add_lora("no adapter")  # type: ignore[arg-type]
            llm.engine.abort("nobody")

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(wrong)
        assert tokens_of(llm, PROMPTS[:1], SHORT) == expected
        call.result(WAIT)
    everything_returned(llm)


def test_a_function_on_logits_may_generate_with_the_same_engine(tiny: Tiny, engines: Engines) -> None:
    for asynchronous in (False, True):
        llm, inner = engines(tiny("llama"), **{"scheduler.async": asynchronous}), list[list[int]]()
        expected = tokens_of(llm, PROMPTS[:3], SHORT)

        def nested(
            output_token_ids: list[int], logits: torch.Tensor, llm: LLM = llm, inner: list[Any] = inner
        ) -> torch.Tensor:
            if len(output_token_ids) == 3 and not inner:
                inner += tokens_of(llm, PROMPTS[2:3], SHORT)
            return logits

        params = [evolve(SHORT, logits_processors=[nested]), SHORT]
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:2], params)] == expected[:2]
        assert inner == expected[2:]


# ---- requests that end by another hand


def aborting(llm: LLM, *names: str) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """A function on logits that aborts requests behind their third token."""

    def abort(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 3:
            for name in names:
                llm.engine.abort(name)
        return logits

    return abort


@pytest.mark.parametrize("asynchronous", [False, True])
def test_generate_returns_a_request_that_a_callback_aborts(asynchronous: bool, tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **{"scheduler.async": asynchronous})
    expected = tokens_of(llm, PROMPTS[:2], SHORT)
    prompts = [{"prompt_token_ids": p, "request_id": name} for p, name in zip(PROMPTS, "ab", strict=False)]
    one, other = llm.generate(prompts, [SHORT, evolve(SHORT, logits_processors=[aborting(llm, "a")])])
    assert (one.outputs[0].finish_reason, other.outputs[0].finish_reason) == ("abort", "length")
    assert one.finished
    assert one.outputs[0].token_ids == expected[0][:3]
    assert other.outputs[0].token_ids == expected[1]
    (own,) = llm.generate([prompts[0]], evolve(SHORT, logits_processors=[aborting(llm, "a")]))
    assert (own.outputs[0].finish_reason, own.outputs[0].token_ids) == ("abort", expected[0][:3])
    everything_returned(llm)


def test_one_of_several_outputs_may_be_aborted(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    prompt = {"prompt_token_ids": PROMPTS[0], "request_id": "x"}
    several = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)
    several = evolve(several, logits_processors=[aborting(llm, "x/1")])
    (output,) = llm.generate([prompt], several)
    assert [one.finish_reason for one in output.outputs] == ["length", "abort", "length"]
    (best,) = llm.generate([prompt], evolve(several, n=2, best_of=3))
    assert [one.finish_reason for one in best.outputs] == ["length", "length"]
    last = list(llm.stream(prompt, several))[-1]
    assert [one.finish_reason for one in last.outputs] == ["length", "abort", "length"]
    everything_returned(llm)


def test_a_stream_ends_when_its_request_is_aborted(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    prompt = {"prompt_token_ids": PROMPTS[0], "request_id": "x"}
    inside = list(llm.stream(prompt, evolve(SHORT, logits_processors=[aborting(llm, "x")])))
    between = []
    for output in llm.stream(prompt, SHORT):
        between.append(output)
        if len(output.outputs[0].token_ids) == 3:
            llm.engine.abort("x")
    for outputs in (inside, between):
        assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (outputs[-1].outputs[0].finish_reason, len(outputs[-1].outputs[0].token_ids)) == ("abort", 3)


def test_an_embedding_that_is_aborted_returns_without_one(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines(tiny("llama"), task="embed", max_num_batched_tokens=8, **{"cache.prefix_caching": False})
    step = llm.engine.step

    def stepped() -> Any:
        llm.engine.abort("x")
        return step()

    monkeypatch.setattr(llm.engine, "step", stepped)
    output = llm.embed([{"prompt_token_ids": PROMPTS[1], "request_id": "x"}, PROMPTS[0]])
    assert [(one.finish_reason, one.outputs is None) for one in output] == [("abort", True), ("stop", False)]


def test_a_beam_search_whose_request_is_aborted_ends_with_what_it_has(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, params = engines(tiny("llama")), BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    expected, rounds = llm.beam_search(PROMPTS[:2], params), list[int]()
    generate = llm.generate_as_given

    def abort(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        llm.engine.abort("x")
        return logits

    def third_round(prompts: list[Any], *arguments: Any, **options: Any) -> Any:
        rounds.append(len(prompts))
        if len(rounds) == 3:
            prompts[0]["request_id"] = "x"
            arguments = ([evolve(one, logits_processors=[abort]) for one in arguments[0]], *arguments[1:])
        return generate(prompts, *arguments, **options)

    monkeypatch.setattr(llm, "generate_as_given", third_round)
    first, second = llm.beam_search(PROMPTS[:2], params)
    assert [one.finish_reason for one in first.sequences] == ["abort", "abort"]
    assert all(len(one.tokens) == len(PROMPTS[0]) + 2 for one in first.sequences)
    assert [one.tokens for one in second.sequences] == [one.tokens for one in expected[1].sequences]
    everything_returned(llm)


def test_another_thread_may_abort_while_generate_runs(tiny: Tiny, engines: Engines) -> None:
    llm, begun = engines(tiny("llama")), Event()

    def watch(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 2:
            begun.set()
        return logits

    def abort() -> None:
        assert begun.wait(WAIT)
        llm.engine.abort("x")

    params = evolve(SHORT, max_tokens=50, logits_processors=[watch])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(abort)
        (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0], "request_id": "x"}], params)
        call.result(WAIT)
    assert output.outputs[0].finish_reason == "abort"
    assert 2 <= len(output.outputs[0].token_ids) < 50


@pytest.mark.parametrize("place", ["schedule", "prepare", "gather", "hand_out"])
def test_an_abort_in_the_middle_of_bookkeeping_is_carried_out_behind_it(
    place: str, tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal's handler may ask for it."""
    llm = engines(tiny("llama"))
    engine = llm.engine
    expected = tokens_of(llm, PROMPTS[:2], SHORT)
    part, name = {
        "schedule": (engine.scheduler, "schedule"),
        "prepare": (engine.joining, "prepare"),
        "gather": (engine.gatherer, "gather"),
        "hand_out": (engine.hand_out, "_append"),
    }[place]
    original, steps = getattr(type(part), name), []

    def interfering(*arguments: Any, **options: Any) -> Any:
        steps.append(name)
        if len(steps) == (1 if place == "prepare" else 3):  # only a step in which requests join has some to prepare
            assert engine.abort("a") is gone
            with pytest.raises(RequestError, match="bookkeeping"):
                engine.step()
        return original(*arguments, **options)

    gone, stays = add(llm, "a", PROMPTS[0], SHORT), add(llm, "b", PROMPTS[1], SHORT)
    monkeypatch.setattr(type(part), name, interfering)
    while engine.has_work:
        engine.step()
    assert (gone.finish_reason, stays.output_token_ids) == ("abort", expected[1])
    assert gone.output_token_ids == expected[0][: len(gone.output_token_ids)]
    everything_returned(llm)
