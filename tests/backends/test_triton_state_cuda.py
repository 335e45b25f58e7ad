"""Whole engines on a GPU with the state backend `triton`: transformers' tokens, in mixed chunked batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import GREEDY, random_prompts
from tiny_models import STATE_FAMILIES

from slotline.core import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])


@pytest.mark.parametrize("name", STATE_FAMILIES)
@pytest.mark.behaviour(62, 153)
def test_every_family_gives_transformers_tokens(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tiny: Callable[..., Path],
    engines: Callable[..., LLM],
    greedy: Callable[[Path, list[int], int], list[int]],
) -> None:
    monkeypatch.setenv("SLOTLINE_DEVICE", "cuda")
    settings: dict[str, Any] = {"scheduler.max_batched_tokens": 24, "memory": "64MiB"}
    path = tiny(name)
    llm = engines(path, **settings)
    assert {group.backend for group in llm.plan.state_groups} == {"triton"}
    expected = [greedy(path, prompt, 20) for prompt in PROMPTS]
    for order in (1, -1):
        outputs = llm.generate(PROMPTS[::order], GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected[::order]
