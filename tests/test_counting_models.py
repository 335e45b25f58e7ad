"""Benchmarks' models that count: the text is known and as many drafts stand as asked for."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slotline.core import LLM, SamplingParams

COUNTING: dict[str, Any] = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "counting_models.py"))
SHAPE = {"vocab_size": 3400, "intermediate_size": 96, "num_key_value_heads": 1, "tie_word_embeddings": False}
TOKENS = 25


def folder(path: Path, right: int | None, **shape: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, **shape, max_position_embeddings=64, eos_token_id=None, bos_token_id=None)
    COUNTING["make_counting"](LlamaForCausalLM(config), right).save_pretrained(path)
    return path


@pytest.mark.parametrize(("right", "length"), [(None, 5.0), (4, 5.0), (3, 4.0), (1, 2.0), (0, 1.0)])
def test_a_text_is_counted_and_as_many_drafts_stand_as_asked(
    tmp_path: Path, right: int | None, length: float, engines: Any
) -> None:
    target = folder(tmp_path / "target", None, hidden_size=128, num_attention_heads=2, num_hidden_layers=3)
    draft = folder(tmp_path / "draft", right, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
    llm: LLM = engines(
        target, **{"drafter.name": "draft_model", "drafter.path": str(draft), "drafter.tokens": 4, "memory": "8MiB"}
    )
    prompts = COUNTING["prompts"](3, 7, 3400, TOKENS + 1)
    params = SamplingParams(temperature=0, max_tokens=1 + 20, ignore_eos=True)
    found = [output.outputs[0].token_ids for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]
    assert found == [list(range(prompt[-1] + 1, prompt[-1] + 22)) for prompt in prompts]
    drafting = llm.engine.drafting
    assert drafting is not None
    assert drafting.counts.failures == 0
    assert drafting.counts.acceptance_length == length


def test_a_model_whose_projection_is_its_embedding_is_refused() -> None:
    config = LlamaConfig(**{**SHAPE, "tie_word_embeddings": True}, hidden_size=64, num_attention_heads=1)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        COUNTING["make_counting"](LlamaForCausalLM(config))
