"""A logits processor or a request's own function that goes wrong ends the requests it goes wrong for, and no other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import GREEDY, random_prompts, tokens_of
from repository import SUPPORT
from tiny_engines import everything_returned

from slotline.core import LLM, SamplingParams
from slotline.core.device import TorchOps
from slotline.core.sampling.logits_processors import ProcessorPipeline
from slotline.registry.errors import PluginError, RequestError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(19, 108)]

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
FAILING = f"{SUPPORT / 'failing_processor.py'}:Failing"
MODES: dict[str, dict[str, Any]] = {
    "plain": {"scheduler.async": False},
    "asynchronous": {"scheduler.async": True},
    "drafted": {"drafter.name": "ngram", "drafter.tokens": 4},
}
PROMPTS = random_prompts([5, 9, 3, 12, 7], seed=11)
WRONG: dict[str, tuple[str, str]] = {
    "raise": ("raise", "ValueError: row"),
    "another shape": ("shape", "ContractError: logits processor 'failing' returned torch.float32"),
    "another dtype": ("dtype", "ContractError: logits processor 'failing' returned torch.float64"),
    "nothing": ("none", "ContractError: logits processor 'failing' returned NoneType"),
    "NaN": (
        "nan",
        "ContractError: the logits processors with work for this request (failing, penalties)",
    ),
    "infinity": (
        "inf",
        "ContractError: the logits processors with work for this request (failing, penalties)",
    ),
    "no token left": ("ban", "RequestError: no token is left to sample"),
}


@pytest.fixture(params=MODES)
def llm(request: pytest.FixtureRequest, tiny: Tiny, engines: Engines) -> LLM:
    return engines(tiny("llama"), **{"plugins.inline": (FAILING,), **MODES[request.param]})


def params(temperature: float = 0, **extra: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=3,
        max_tokens=12,
        ignore_eos=True,
        repetition_penalty=1.1,
        extra_args=extra or None,
    )


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_processor_that_goes_wrong_for_a_request_ends_that_request_alone(
    name: str, temperature: float, llm: LLM
) -> None:
    how, message = WRONG[name]
    good = [params(temperature)] * 5
    want = [output.outputs[0] for output in llm.generate(PROMPTS, good)]
    mixed = list(good)
    mixed[1] = params(temperature, fail=how, fail_at=4)
    mixed[3] = params(temperature, fail="not yet")
    found = [output.outputs[0] for output in llm.generate(PROMPTS, mixed)]
    for i in (0, 2, 3, 4):
        assert (found[i].token_ids, found[i].finish_reason) == (want[i].token_ids, "length")
    assert found[1].finish_reason == "error"
    assert str(found[1].stop_reason).startswith(message)
    assert found[1].token_ids == want[1].token_ids[:4]  # what came before stays
    everything_returned(llm)
    assert tokens_of(llm, PROMPTS, good[0]) == [output.token_ids for output in want]


def test_a_processor_that_fails_to_check_a_request_refuses_it_alone(llm: LLM) -> None:
    want = tokens_of(llm, PROMPTS, params())
    with pytest.raises(PluginError, match="logits processor 'failing' failed to check a request: KeyError"):
        llm.generate(PROMPTS, [params(), params(fail="validate"), *[params()] * 3])
    everything_returned(llm)
    assert tokens_of(llm, PROMPTS, params()) == want


def test_a_processor_that_cannot_be_built_is_an_error_with_its_cause(tiny: Tiny, engines: Engines) -> None:
    with pytest.raises(PluginError, match=r"logits_processor:failing of .* cannot be built for this model: KeyError"):
        engines(tiny("llama"), **{"plugins.inline": (FAILING,), "max_num_seqs": 13})


def test_the_first_token_may_fail_and_several_requests_at_once(llm: LLM) -> None:
    mixed = [params(fail=how) for how in ("raise", "nan", "ban", "shape")]
    found = llm.generate(PROMPTS, [*mixed, params()])
    assert [output.outputs[0].finish_reason for output in found] == ["error"] * 4 + ["length"]
    assert [output.outputs[0].token_ids for output in found[:4]] == [[]] * 4
    everything_returned(llm)


def test_what_fails_behind_a_draft_that_falls_fails_nobody(tiny: Tiny, engines: Engines) -> None:
    """Few tokens repeat themselves and are drafted for; what fails on a place that no text reaches is harmless."""
    llm = engines(tiny("llama"), **MODES["drafted"])
    prompt = [5, 6, 7, 8] * 4
    common: dict[str, Any] = {"max_tokens": 30, "seed": 1, "ignore_eos": True, "allowed_token_ids": [5, 6, 7, 8]}
    (want,) = tokens_of(llm, [prompt], SamplingParams(**common))
    seen: list[list[int]] = []

    def refuses_what_is_not_said(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(output)
        if output != want[: len(output)]:
            raise ValueError("never said")
        return logits

    own = SamplingParams(logits_processors=[refuses_what_is_not_said], **common)
    (output,) = llm.generate([prompt], own)
    assert any(output != want[: len(output)] for output in seen)  # drafts did fall
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (want, "length")


def test_cached_prefixes_are_right_after_a_failure(llm: LLM) -> None:
    (prompt,) = random_prompts([30], seed=12)
    want = tokens_of(llm, [prompt])
    llm.engine.scheduler.cache.reset()
    llm.generate([prompt], params(fail="ban", fail_at=6))
    assert tokens_of(llm, [prompt]) == want


def test_a_processor_that_cannot_let_go_of_a_row_is_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    (output,) = llm.generate([PROMPTS[0]], params(fail="release"))
    assert output.outputs[0].finish_reason == "length"
    assert "'failing' failed to release row" in caplog.text
    everything_returned(llm)


def test_a_row_without_work_is_neither_shown_nor_released(llm: LLM) -> None:
    (slot,) = [slot for slot in llm.engine.pipeline.slots if slot.name == "failing"]
    processor: Any = slot.processor
    before = (processor.calls, len(processor.released))
    llm.generate(PROMPTS, params())
    assert (processor.calls, len(processor.released)) == before


def test_a_step_whose_requests_need_no_processor_returns_the_logits_themselves(tiny: Tiny, engines: Engines) -> None:
    pipeline: ProcessorPipeline = engines(tiny("llama")).engine.pipeline
    logits, tokens = torch.zeros(2, 384), torch.tensor([1, 2])
    assert len(pipeline.slots) >= 6
    found = pipeline.apply(logits, torch.tensor([0, 1]).numpy(), all_greedy=False)
    assert found.logits is logits
    assert found.mark(tokens, TorchOps()) is tokens


# ---- contradictions


def test_constraints_that_leave_no_token_fail_the_request_with_their_names(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    impossible = SamplingParams(temperature=0, allowed_token_ids=[7, 8], bad_words_token_ids=[[7], [8]], max_tokens=5)
    found = llm.generate(PROMPTS[:3], [GREEDY, impossible, GREEDY])
    assert [output.outputs[0].finish_reason for output in found] == ["length", "error", "length"]
    message = str(found[1].outputs[0].stop_reason)
    assert "RequestError: no token is left to sample" in message
    assert "(allowed_token_ids, bad_words)" in message
    assert "fix: loosen" in message
    assert [found[i].outputs[0].token_ids for i in (0, 2)] == tokens_of(llm, [PROMPTS[0], PROMPTS[2]])


# ---- a request's own functions


def forced(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """9, 10, 11, ..."""
    result = torch.full_like(logits, -torch.inf)
    result[9 + len(output)] = 0.0
    return result


@pytest.mark.parametrize("mode", MODES)
def test_a_function_of_a_request_sees_its_tokens_and_decides_its_logits(
    mode: str, tiny: Tiny, engines: Engines
) -> None:
    llm = engines(tiny("llama"), **MODES[mode])
    seen: list[tuple[list[int], list[int]]] = []

    def watch(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, output))
        return logits

    own = SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True, logits_processors=[watch, forced])
    plain, found = llm.generate(PROMPTS[:2], [GREEDY, own])
    assert plain.outputs[0].token_ids == tokens_of(llm, PROMPTS[:1])[0]
    assert found.outputs[0].token_ids == [9, 10, 11, 12, 13]
    assert {tuple(prompt) for prompt, _ in seen} == {tuple(PROMPTS[1])}
    assert [9, 10, 11, 12] in [output for _, output in seen]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda output, logits: logits / (1 if len(output) < 3 else 1 // 0), "ZeroDivisionError"),
        (
            lambda output, logits: logits if len(output) < 3 else logits[:5],
            r"logits_processors[0] returned torch.float32 [5]",
        ),
        (lambda output, logits: logits if len(output) < 3 else None, "logits_processors[0] returned None"),
        (lambda output, logits: logits * (1 if len(output) < 3 else torch.nan), "logits_processors[0] returned NaN"),
        (lambda output, logits: logits - (0 if len(output) < 3 else torch.inf), "no token is left"),
    ],
    ids=["raises", "shape", "none", "nan", "banned"],
)
def test_a_function_that_goes_wrong_ends_its_request_alone(
    mode: str, wrong: Callable[..., Any], message: str, tiny: Tiny, engines: Engines
) -> None:
    llm = engines(tiny("llama"), **MODES[mode])
    good = tokens_of(llm, PROMPTS[:2])
    bad = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logits_processors=[wrong])
    found = llm.generate(PROMPTS[:3], [GREEDY, GREEDY, bad])
    assert [output.outputs[0].token_ids for output in found[:2]] == good
    assert found[2].outputs[0].finish_reason == "error"
    assert message in str(found[2].outputs[0].stop_reason)
    everything_returned(llm)


@pytest.mark.parametrize("wrong", [5, ["x"], [lambda: 0], [lambda a, b, c, d: 0]])
def test_what_cannot_be_called_is_refused_before_it_runs(wrong: Any, tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    with pytest.raises(RequestError, match="logits_processors"):
        llm.generate([[5]], SamplingParams(logits_processors=wrong))
    everything_returned(llm)


def test_the_log_says_that_functions_are_slow(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    from tiny_engines import DEFAULTS

    llm = LLM(tiny("llama"), **DEFAULTS)
    with caplog.at_level(logging.WARNING, "slotline"):
        llm.generate([[5]], SamplingParams(max_tokens=2, logits_processors=[forced]))
        llm.generate([[5]], SamplingParams(max_tokens=2, logits_processors=[forced]))
    assert caplog.text.count("is slow") == 1
