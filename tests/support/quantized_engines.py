"""Engines on quantized checkpoints, and what transformers answers on the dequantized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models
import torch
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams

PROMPT = [1, 40, 77, 203, 9, 118, 30]
TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)


def engine(path: Path, **settings: Any) -> LLM:
    """Return an engine that rounds no activations, unless `settings` say so."""
    return LLM(str(path), **{**DEFAULTS, "weights.activation": "none", **settings})


def answer(llm: LLM) -> tuple[list[int], list[float]]:
    """The tokens that follow the prompt, and their log-probabilities."""
    found = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY)[0].outputs[0]
    assert found.logprobs is not None
    return list(found.token_ids), [
        step[token].logprob for token, step in zip(found.token_ids, found.logprobs, strict=True)
    ]


def expected(path: Path) -> tuple[list[int], list[float]]:
    """The same of transformers' model in float32."""
    tokens = tiny_models.greedy_reference(path, PROMPT, TOKENS)
    logits = tiny_models.logits_reference(path, PROMPT + tokens).double().log_softmax(-1)
    return tokens, [float(logits[len(PROMPT) + i - 1, token]) for i, token in enumerate(tokens)]


def same(found: tuple[list[int], list[float]], wanted: tuple[list[int], list[float]], within: float = 1e-4) -> None:
    assert found[0] == wanted[0]
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(wanted[1]), atol=within, rtol=0)
