"""The backends around libraries on a GPU: the text of the `torch` backend in every graph mode, group by group too."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_driver import random_prompts

from slotline.core import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25, 9])
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
MODES = ("none", "piecewise", "full_decode_only", "full_and_piecewise")
SETTINGS: dict[str, dict[str, Any]] = {
    "flashinfer": {"backend.flashinfer.prefill": "fa2"},
    "flash_attn": {"cache.block_size": 256},
    "flex": {},
}


def engine(path: Path, **settings: Any) -> LLM:
    options: dict[str, Any] = {"dtype": "float16", "max_model_len": 96, "max_num_batched_tokens": 24}
    options |= {"memory": "256MiB", "graphs.sizes": (1, 2, 4, 8), "observability.check_integrity": True}
    return LLM(model=str(path), device="cuda", **{**options, **settings})


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint with heads of 64, and the text of the `torch` backend."""
    path = tiny_models.build("qwen3", tmp_path_factory.mktemp("qwen3"), 0, head_dim=64)
    return path, tokens(engine(path, backend="torch", **{"graphs.mode": "none"}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", SETTINGS)
@pytest.mark.behaviour(21, 23, 27, 87)
def test_every_graph_mode_gives_the_text_of_the_torch_backend(
    backend: str, mode: str, qwen3: tuple[Path, list[list[int]]]
) -> None:
    if find_spec(backend) is None and backend != "flex":
        pytest.skip(f"{backend} is not installed")
    path, expected = qwen3
    llm = engine(path, backend=backend, **{"graphs.mode": mode}, **SETTINGS[backend])
    assert tokens(llm) == expected
    assert tokens(llm) == expected, "again, over cached prefixes"


def test_each_group_keeps_its_own_backend_and_graph(tmp_path: Path) -> None:
    """Mixed sliding and full layers: FlashInfer captured for one, FlexAttention breaking the graph for the other."""
    if find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    path = tiny_models.build("gemma3", tmp_path, 0, head_dim=64)
    expected = tokens(engine(path, backend="torch", **{"graphs.mode": "none"}))
    llm = engine(
        path,
        **{"attention.backend": {"full": "flashinfer", "sliding": "flex"}, "backend.flashinfer.prefill": "fa2"},
    )
    assert {group.backend: group.captured("decode") for group in llm.plan.groups} == {"flashinfer": True, "flex": False}
    assert tokens(llm) == expected
