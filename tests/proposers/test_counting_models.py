"""Benchmarks' models that count: the text is known and as many drafts stand as asked for."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from slotline.core import LLM, SamplingParams
from slotline.proposers.eagle.heads import Eagle3Head, read_config

COUNTING: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "counting_models.py"))
SHAPE = {"vocab_size": 3400, "intermediate_size": 96, "num_key_value_heads": 1, "tie_word_embeddings": False}
TOKENS = 25


def folder(path: Path, right: int | None, **shape: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, **shape}, max_position_embeddings=64, eos_token_id=None, bos_token_id=None)
    COUNTING["make_counting"](LlamaForCausalLM(config), right).save_pretrained(path)
    return path


@pytest.mark.parametrize(("right", "length"), [(None, 5.0), (4, 5.0), (3, 4.0), (1, 2.0), (0, 1.0)])
def test_a_text_is_counted_and_as_many_drafts_stand_as_asked(
    tmp_path: Path, right: int | None, length: float, engines: Any
) -> None:
    target = folder(tmp_path / "target", None, hidden_size=128, num_attention_heads=2, num_hidden_layers=3)
    draft = folder(tmp_path / "draft", right, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
    llm: LLM = engines(
        target,
        **{
            "drafter.name": "draft_model",
            "drafter.path": str(draft),
            "drafter.tokens": 4,
            "drafter.adaptive": False,
            "memory": "8MiB",
        },
    )
    prompts = COUNTING["prompts"](3, 7, 3400, TOKENS + 1)
    params = SamplingParams(temperature=0, max_tokens=1 + 20, ignore_eos=True)
    found = [output.outputs[0].token_ids for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]
    assert found == [list(range(prompt[-1] + 1, prompt[-1] + 22)) for prompt in prompts]
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    assert drafting.counts.failures == 0
    assert drafting.counts.acceptance_length == length


@pytest.mark.spread(2)
@pytest.mark.parametrize(("right", "length"), [(None, 5.0), (3, 4.0), (0, 1.0)])
def test_a_head_counts_too(tmp_path: Path, right: int | None, length: float, engines: Any) -> None:
    """Its layer is large enough that a token's product with itself stands out."""
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4, "num_key_value_heads": 4}
    target, head = folder(tmp_path / "target", None, **shape), tmp_path / "head"
    config = {**SHAPE, **shape, "vocab_size": 3400, "draft_vocab_size": 1800, "head_dim": 64}
    config["num_hidden_layers"] = 1
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config))
    weights = Eagle3Head(read_config(head)).state_dict()
    save_file(weights, head / "model.safetensors")
    settings = {
        "drafter.name": "eagle3",
        "drafter.path": str(head),
        "drafter.tokens": 4,
        "drafter.adaptive": False,
        "memory": "32MiB",
    }
    llm: LLM = engines(target, **settings)
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    network: Any = drafting.drafter._head  # type: ignore[attr-defined]
    embedding = llm.engine.runner.model.hf_model.get_input_embeddings().weight  # type: ignore[attr-defined]
    COUNTING["make_head_count"](network, embedding)
    COUNTING["count_to"](network.lm_head.weight, embedding, 256, right)
    prompts = COUNTING["prompts"](3, 7, 1800, TOKENS + 1)
    params = SamplingParams(temperature=0, max_tokens=1 + 20, ignore_eos=True)
    found = [output.outputs[0].token_ids for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]
    assert found == [list(range(prompt[-1] + 1, prompt[-1] + 22)) for prompt in prompts]
    assert drafting.counts.failures == 0
    assert drafting.counts.acceptance_length == length


def test_a_model_whose_projection_is_its_embedding_is_refused() -> None:
    config = LlamaConfig(**{**SHAPE, "tie_word_embeddings": True}, hidden_size=64, num_attention_heads=1)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        COUNTING["make_counting"](LlamaForCausalLM(config))
