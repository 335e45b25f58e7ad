"""Logits processors on a GPU: none of those that ship waits for the device, and texts are those of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slotline.core import LLM, SamplingParams

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.behaviour(30, 108),
]

ASKED: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {20: 3.0, 21: -3.0}},
    "min_tokens": {"min_tokens": 20},
    "allowed_token_ids": {"allowed_token_ids": list(range(10, 900))},
    "bad_words": {"bad_words": ["self", "return x"]},
    "no_repeat_ngram": {"extra_args": {"no_repeat_ngram_size": 2}},
    "dry": {"extra_args": {"dry_multiplier": 2.0, "dry_allowed_length": 1}},
    "xtc": {"extra_args": {"xtc_probability": 0.7, "xtc_threshold": 0.05}},
    "thinking_budget": {
        "extra_args": {
            "thinking_token_budget": 3,
            "thinking_start_token_ids": [6],
            "thinking_end_token_ids": [9],
        },
        "logit_bias": {6: 50.0},
    },
    "mirostat": {"extra_args": {"mirostat_tau": 3.0}},
}
PROMPT = "def read(self, path):\n    return self.read(path)\n\ndef"
NAMED = ("no_repeat_ngram", "dry", "xtc", "thinking_budget", "mirostat")


def engine(device: str) -> LLM:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "memory": "64MiB", "backend": "torch"}
    return LLM(device=device, logits_processors={name: {} for name in NAMED}, **options)


def params() -> list[SamplingParams]:
    return [SamplingParams(temperature=0.8, seed=i, max_tokens=24, **asked) for i, asked in enumerate(ASKED.values())]


def test_no_processor_waits_for_the_device() -> None:
    llm = engine("cuda")
    pipeline = llm.engine.pipeline
    apply, calls = pipeline.apply, 0

    def watched(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return apply(*arguments, **settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    pipeline.apply = watched  # type: ignore[method-assign]
    for name, output in zip(ASKED, llm.generate([PROMPT] * len(ASKED), params()), strict=True):
        assert output.outputs[0].finish_reason != "error", (name, output.outputs[0].stop_reason)
    assert calls > 20


def test_texts_are_those_of_a_cpu() -> None:
    torch.set_float32_matmul_precision("highest")
    prompts = [PROMPT] * len(ASKED)
    expected = [output.outputs[0].token_ids for output in engine("cpu").generate(prompts, params())]
    found = [output.outputs[0].token_ids for output in engine("cuda").generate(prompts, params())]
    assert dict(zip(ASKED, found, strict=True)) == dict(zip(ASKED, expected, strict=True))
