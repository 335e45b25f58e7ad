"""Context shards on GPUs: one that holds two shards, and two that hold one each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from context_shards_cases import DECODES, MIXED, compare
from engine_driver import random_prompts

from slotline.core import LLM, SamplingParams

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.behaviour(8, 162),
]

PROMPTS = random_prompts([70, 3, 81, 33, 1, 64], seed=5)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
COMMON: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 128,
    "max_num_batched_tokens": 48,
    "memory": "64MiB",
    "observability.check_integrity": True,
}


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    """float32 means float32 here, not tf32."""
    torch.set_float32_matmul_precision("highest")


def devices(count: int) -> tuple[str, ...]:
    if count > torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    return ("cuda:0", f"cuda:{count - 1}")


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("family", ["llama_deep", "deepseek_v2"])
def test_shards_on_gpus_give_the_same_text(family: str, num_devices: int, tmp_path: Path) -> None:
    path = str(tiny_models.build(family, tmp_path, 0))
    settings = {**COMMON, "dtype": "float32", "graphs.mode": "none"}
    want = [o.outputs[0].token_ids for o in LLM(model=path, **settings).generate(PROMPTS, GREEDY)]
    llm = LLM(model=path, **settings, **{"parallel.context_shards": devices(num_devices)})
    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == want
    assert sum(o.metrics.num_cached_tokens for o in outputs) > 0


@pytest.mark.parametrize("requests", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("backend", ["triton", "flash_attn", "flashinfer", "torch"])
def test_shards_merge_to_the_attention_and_the_lse_of_the_whole(
    backend: str, sinks: bool, requests: list[tuple[int, int]]
) -> None:
    packages = {"flash_attn": "flash_attn", "flashinfer": "flashinfer"}
    if backend in packages:
        pytest.importorskip(packages[backend])
    output, lse = compare(backend, "cuda", torch.bfloat16, requests, 2, sinks=sinks)
    assert output < 0.04  # an output of 2 to 4 is rounded to 1/64 in bfloat16, and its parts are, too
    assert lse < 0.01
