"""Requests of every kind over two ranks: all ranks give the same, bit for bit what each request gives alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import random_prompts
from thread_ranks import ThreadRanks

from slotline.core import LLM, LoRARequest, RequestOutput
from slotline.planner.plan import SMALL_MODEL
from tests.engine.test_everything_together import PROMPTS, asked, said
from tests.llm.test_pooling import POOLING, assert_embeddings, assert_equal, logits_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(19, 102)]

Tiny = Callable[..., Path]


def numbers(output: RequestOutput) -> list[float]:
    return [p.logprob for entry in output.outputs[0].logprobs or () for p in entry.values()]


@pytest.mark.slow
def test_each_says_over_ranks_what_it_says_alone_and_in_one_process() -> None:
    """In float32 with `batch_invariant`; two adapters take turns in one slot, and grammars are compiled meanwhile."""
    settings: dict[str, Any] = {"dtype": "float32", "batch_invariant": True, "scheduler.max_batched_tokens": 16}
    settings |= {"lora.name": "torch", "lora.max_adapters": 1, "scheduler.async": True}
    ranks = ThreadRanks(**settings)
    adapters = [
        None,
        *(LoRARequest(name, i, SMALL_MODEL / "adapters" / name) for i, name in enumerate(("typed", "docstrings"), 1)),
    ]
    count = 12
    prompts, params = [PROMPTS[i % len(PROMPTS)] for i in range(count)], [asked(i) for i in range(count)]
    lora = [adapters[i % len(adapters)] for i in range(count)]

    def answers(llm: LLM) -> list[RequestOutput]:
        return llm.generate(prompts, params, lora_request=lora, progress=False)

    together, others = ranks.each(answers)
    assert [said(output) for output in together] == [said(output) for output in others]
    for index in range(0, count, 4):
        ((alone,), _) = ranks.each(
            lambda llm, i=index: llm.generate(prompts[i], params[i], lora_request=lora[i], progress=False)
        )
        assert said(together[index]) == said(alone)
    ranks.close()
    for ours, theirs in zip(together, answers(LLM(**settings)), strict=True):
        assert ours.outputs[0].text == theirs.outputs[0].text
        assert numbers(ours) == pytest.approx(numbers(theirs), abs=1e-3)


@pytest.mark.parametrize("method", ["last", "mean"])
def test_embeddings_are_those_of_transformers(method: str, tiny: Tiny) -> None:
    path, prompts = tiny("llama"), random_prompts([3, 33, 17, 1])
    ranks = ThreadRanks(path, **{"scheduler.max_batched_tokens": 24, POOLING: method, "task": "embed"})
    ranks.each(lambda llm: assert_embeddings(llm, path, prompts, method))
    ranks.close()


def test_class_scores_are_those_of_transformers(tiny: Tiny) -> None:
    path, prompts = tiny("llama", architecture="LlamaForSequenceClassification"), random_prompts([3, 33, 17, 1])
    ranks = ThreadRanks(path, task="classify")

    def scores(llm: LLM) -> list[torch.Tensor]:
        return [output.outputs.data for output in llm.classify(prompts)]

    for rank in ranks.each(scores):
        for prompt, found in zip(prompts, rank, strict=True):
            assert_equal(found, logits_of(path, prompt).softmax(-1))
    ranks.close()
