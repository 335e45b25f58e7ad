"""Requests of every kind in one batch: each says, bit for bit, what it says alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slotline.core import LLM, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from slotline.planner.plan import SMALL_MODEL

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(19, 75, 102)]

PROMPTS = ("def main(", "import os\n", "class A:\n    def", "x = [1, 2,", "return ")
SOME: tuple[tuple[float, dict[str, Any]], ...] = (
    (0.3, {"repetition_penalty": 1.2}),
    (0.3, {"presence_penalty": 0.5, "frequency_penalty": -0.2}),
    (0.3, {"logit_bias": {300: 5.0, 301: -5.0}}),
    (0.2, {"min_tokens": 3}),
    (0.2, {"stop": ["(", "\n"], "include_stop_str_in_output": True}),
    (0.2, {"stop_token_ids": [10, 11, 12, 14]}),
    (0.2, {"bad_words": ["self"]}),
    (0.2, {"structured_outputs": StructuredOutputsParams(regex=r"[a-z]{2,20}\(\)")}),
    (0.15, {"guidance_scale": 1.5}),
    (0.3, {"logprobs": 2}),
    (0.2, {"prompt_logprobs": 1}),
    (0.1, {"logits_processors": [lambda tokens, logits: logits.index_fill(0, logits.argmax(), -9.0)]}),
)
"""How often each of these is asked for."""


def asked(seed: int) -> SamplingParams:
    """What one request asks for."""
    rng = random.Random(seed)
    chosen = {name: value for chance, part in SOME if rng.random() < chance for name, value in part.items()}
    limits: dict[str, Any] = {"top_k": rng.choice([0, 5, 40]), "top_p": rng.choice([1, 0.8])}
    limits |= {"min_p": rng.choice([0, 0.05]), "temperature": rng.choice([0, 0.7, 1.3])}
    return SamplingParams(seed=seed, max_tokens=rng.randint(3, 12), **limits, **chosen)


def said(output: RequestOutput) -> Any:
    """All that a request gives, with the exact value of every log-probability."""
    (one,) = output.outputs
    return one.token_ids, one.text, one.finish_reason, one.stop_reason, repr(one.logprobs), repr(output.prompt_logprobs)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "settings", [{}, {"scheduler.async": True, "scheduler.max_batched_tokens": 16}], ids=["plain", "asynchronous"]
)
def test_each_says_what_it_says_alone(settings: dict[str, Any]) -> None:
    """In float32 with `batch_invariant`; two adapters take turns in one slot."""
    llm = LLM(dtype="float32", batch_invariant=True, **{"lora.name": "torch", "lora.max_adapters": 1, **settings})
    folder = SMALL_MODEL / "adapters"
    adapters = [None, *(LoRARequest(name, i, folder / name) for i, name in enumerate(("typed", "docstrings"), start=1))]
    requests = [(PROMPTS[i % len(PROMPTS)], asked(i), adapters[i % len(adapters)]) for i in range(30)]
    prompts, params, lora = map(list, zip(*requests, strict=True))
    together = llm.generate(prompts, params, lora_request=lora, progress=False)
    assert len({output.outputs[0].finish_reason for output in together}) == 2
    for (prompt, one, adapter), output in zip(requests, together, strict=True):
        (alone,) = llm.generate(prompt, one, lora_request=adapter, progress=False)
        assert said(output) == said(alone), one
