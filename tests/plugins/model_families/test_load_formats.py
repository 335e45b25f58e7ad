"""Forms in which weights are loaded: of the checkpoint, random, and as the engine wrote them after its passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import ModelError, NegotiationError, SlotlineError

Tiny = Callable[..., Path]
SETTINGS: dict[str, Any] = {
    "backend": "torch",
    "memory": "4MiB",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "device": "cpu",
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [9, 3]}]


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def bare(folder: Path, target: Path) -> Path:
    """The folder without its weights."""
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_row_126_random_weights_run_a_folder_without_weights(family: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = bare(tiny(family), tmp_path / "bare")
    llm = LLM(model=str(folder), **SETTINGS, **{"load.format": "dummy"})
    assert answers(llm) == answers(LLM(model=str(folder), **SETTINGS, **{"load.format": "dummy"}))
    assert "random weights" in " ".join(llm.engine.notes)
    assert "load.format" in llm.plan.explain()
    assert "dummy" in llm.plan.explain()


def test_random_weights_are_finite_and_of_the_dtype(tiny: Tiny, tmp_path: Path) -> None:
    folder = bare(tiny("llama"), tmp_path / "bare")
    llm = LLM(model=str(folder), dtype="bfloat16", optimize=False, **SETTINGS, **{"load.format": "dummy"})
    parameters = dict(llm.engine.runner.model.hf_model.named_parameters())
    assert all(parameter.dtype == torch.bfloat16 for parameter in parameters.values())
    assert all(bool(parameter.isfinite().all()) for parameter in parameters.values())
    assert len({float(p.flatten()[0]) for p in parameters.values() if p.dim() == 2}) > 5  # not one block for all


def test_a_folder_without_weights_needs_the_dummy_format(tiny: Tiny, tmp_path: Path) -> None:
    folder = bare(tiny("llama"), tmp_path / "bare")
    with pytest.raises(ModelError, match="holds no weights"):
        LLM(model=str(folder), **SETTINGS)


def test_a_family_that_makes_no_random_weights_refuses(tiny_vision_model: Any) -> None:
    with pytest.raises(NegotiationError, match=r"load\.format = 'dummy': model family .* reads hf"):
        LLM(model=str(tiny_vision_model()), **SETTINGS, **{"load.format": "dummy"})


def test_an_unknown_format_is_a_wrong_setting(tiny: Tiny) -> None:
    with pytest.raises(SlotlineError, match=r"load\.format"):
        LLM(model=str(tiny("llama")), **SETTINGS, **{"load.format": "tensorizer"})
