"""Log-probabilities of prompts in chunks: kept on the device until a prompt ends, and sent once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import add, random_prompts, recorded, run_all

from slotline.core import LLM, SamplingParams
from slotline.core.batch.request import Request

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(112)]

PROMPTS = random_prompts([33, 29, 2, 1], seed=4)
TOPS = (3, 0, 2, 1)


@pytest.mark.parametrize("overlapped", [False, True])
def test_chunks_send_the_scores_of_a_prompt_in_one_copy(
    overlapped: bool, tiny: Callable[..., Path], engines: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scored(llm: LLM) -> list[Request]:
        params = [SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=top) for top in TOPS]
        requests = [add(llm, str(i), p, one) for i, (p, one) in enumerate(zip(PROMPTS, params, strict=True))]
        run_all(llm)
        return requests

    whole = scored(engines(tiny("llama"), max_num_batched_tokens=128))
    llm = engines(tiny("llama"), max_num_batched_tokens=10, **{"scheduler.async": overlapped})
    sent, download = list[torch.Tensor](), llm.engine.runner.staging.download

    def watched(tensor: torch.Tensor) -> Any:
        sent.extend([tensor] if tensor.dtype == torch.int32 else [])
        return download(tensor)

    monkeypatch.setattr(llm.engine.runner.staging, "download", watched)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("waits for the device"))
    with recorded(llm) as steps:
        found = scored(llm)
    ends = {
        number
        for number, step in enumerate(steps)
        for row, first, count in zip(step.rows.tolist(), step.num_computed, step.num_scheduled, strict=True)
        if first < len(PROMPTS[row]) - 1 <= first + count  # a position scores the token after it
    }
    assert len(sent) == len(ends) < len(steps)
    assert sum(tensor.numel() for tensor in sent) == sum(
        (len(prompt) - 1) * (2 * top + 3) for prompt, top in zip(PROMPTS, TOPS, strict=True)
    )
    for ours, theirs, prompt, top in zip(found, whole, PROMPTS, TOPS, strict=True):
        assert ours.prompt_logprobs is not None
        assert ours.prompt_logprobs[0] is None
        for own, other, token in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], prompt[1:], strict=True):
            assert list(own) == list(other)
            assert next(iter(own)) == token
            assert len(own) in (top, top + 1)
            assert [one.logprob for one in own.values()] == pytest.approx(
                [one.logprob for one in other.values()], abs=1e-5
            )


def test_a_prompt_that_begins_anew_is_scored_anew(tiny: Callable[..., Path], engines: Callable[..., LLM]) -> None:
    llm = engines(tiny("llama"), max_num_batched_tokens=10)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    expected = add(llm, "undisturbed", PROMPTS[0], params)
    run_all(llm)
    ended, again = (add(llm, name, PROMPTS[0], params) for name in ("ended", "again"))
    llm.engine.step()
    llm.engine.step()
    assert ended.inputs["prompt_scores"]
    llm.engine.abort("ended")
    llm.engine.step()
    llm.engine.scheduler._preempt_last()
    run_all(llm)
    assert again.metrics.num_preemptions == 1
    assert again.prompt_logprobs == expected.prompt_logprobs
    assert "prompt_scores" not in again.inputs
