"""Blocks between a GPU's pool and pinned host memory: bit for bit, beside graphs and overlapping steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_driver import random_prompts

from slotline.backends.cuda.copies import CudaCopies
from slotline.core import LLM, SamplingParams
from slotline.plugins.kv_transfer import block_copy
from slotline.plugins.kv_transfer.block_copy import CacheBlockCopy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = random_prompts([70, 90, 81, 64, 75], seed=5)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    """float32 means float32 here, not tf32."""
    torch.set_float32_matmul_precision("highest")


@pytest.mark.behaviour(161)
@pytest.mark.parametrize("staging", [1, 4096, block_copy.STAGING_BYTES])
def test_blocks_go_to_the_host_and_come_back(staging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "STAGING_BYTES", staging)
    pool = torch.randint(0, 256, (40, 2, 1024), dtype=torch.uint8, device="cuda")
    layers = [pool[..., :256], pool[..., 256:1024]]
    copy = CacheBlockCopy([layers])
    assert copy.block_bytes == [2048]
    rows = torch.zeros((40, 2048), dtype=torch.uint8, pin_memory=True)
    saved, target = [7, 3, 30, 31, 39], [1, 2, 3, 20, 21]
    want = pool[saved].cpu()
    for _ in range(20):
        copy.to_host(0, saved, [rows[i] for i in range(5)])
        pool[saved] = 0  # what a forward pass does to them
        copy.to_device(0, target, [rows[i] for i in range(5)])
        assert torch.equal(pool[target].cpu(), want)
        saved, target = target, saved


@pytest.mark.behaviour(89, 161)
@pytest.mark.parametrize("size", [1, 4096, block_copy.BESIDE_BYTES])
def test_blocks_come_back_beside_computations(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "BESIDE_BYTES", size)
    pool = torch.randint(0, 256, (40, 2, 1024), dtype=torch.uint8, device="cuda")
    copy = CacheBlockCopy([[pool[..., :256], pool[..., 256:1024]]], lambda device: CudaCopies(str(device)))
    rows, work = torch.zeros((5, 2048), dtype=torch.uint8, pin_memory=True), torch.rand(2048, 2048, device="cuda")
    saved, target = [7, 3, 30, 31, 39], [1, 2, 3, 20, 21]
    want = pool[saved].cpu()
    for _ in range(20):
        is_saved = copy.begin_to_host(0, saved, list(rows))
        pool[saved] = 0  # what a forward pass does to them
        work = torch.nn.functional.normalize(work @ work)
        is_loaded = copy.begin_to_device(0, target, list(rows))
        while not is_loaded():
            pass
        assert is_saved()
        assert torch.equal(rows, want.view(5, 2048))
        assert torch.equal(pool[target].cpu(), want)
        saved, target = target, saved


@pytest.mark.behaviour(96, 161)
@pytest.mark.parametrize("connector", ["host_memory", "tiers"])
@pytest.mark.parametrize("family", ["llama_deep", "gemma3", "deepseek_v2"])
@pytest.mark.parametrize("drafter", ["", "ngram"])
def test_evicted_prefixes_come_back_from_pinned_memory(
    family: str, drafter: str, connector: str, tmp_path: Path
) -> None:
    path = tiny_models.build(family, tmp_path, 0)
    common: dict[str, Any] = {
        "dtype": "float32",
        "device": "cuda",
        "max_model_len": 128,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 2,
        "drafter.name": drafter,
        "observability.check_integrity": True,
    }
    plain = LLM(model=str(path), memory="64MiB", **common)
    want = [plain.generate([p], GREEDY)[0].outputs[0].token_ids for p in PROMPTS]
    pool = plain.plan.pool
    assert pool is not None
    blocks = plain.engine.scheduler.cache.blocks_for_one(128) + 3
    host: dict[str, Any] = {"kv_connector.name": connector, "kv_connector.host_memory.memory": "8MiB"}
    host |= {"kv_connector.tiers.tiers": ("host_memory",)}
    llm = LLM(model=str(path), memory=f"{-(-blocks * pool.block_bytes // 1024)}KiB", **common, **host)
    loaded = 0
    for _ in range(3):
        outputs = [llm.generate([p], GREEDY)[0] for p in PROMPTS]
        assert [o.outputs[0].token_ids for o in outputs] == want
        loaded = sum(o.metrics.num_loaded_tokens for o in outputs)
    assert loaded > 0
    outputs = llm.generate(PROMPTS, GREEDY)  # together: preemptions, and steps that overlap
    assert [o.outputs[0].token_ids for o in outputs] == want
