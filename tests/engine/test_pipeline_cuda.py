"""Pipeline stages over GPUs, and a GPU that is not the first: the same text as on the CPU. Skipped without GPUs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_driver import random_prompts

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import ConfigError, NegotiationError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
SAME, BOTH = ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")
PIPELINES = [SAME, pytest.param(BOTH, marks=two_gpus), pytest.param((*BOTH, "cuda:0"), marks=two_gpus)]


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    """float32 means float32 here, not tf32."""
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def the_current_device_stays() -> Any:
    """Whatever an engine runs on, its caller's current device is what it was."""
    before = torch.cuda.current_device()
    yield
    assert torch.cuda.current_device() == before


def engine(path: Path, device: str, **settings: Any) -> LLM:
    options = {"dtype": "float32", "max_model_len": 96, "max_num_batched_tokens": 24, "memory": "8MiB"}
    options |= {"observability.check_integrity": True, "observability.progress": False, "graphs.sizes": (1, 2, 4, 8)}
    return LLM(model=str(path), device=device, **{**options, **settings})


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def on_the_cpu(path: Path) -> list[list[int]]:
    return tokens(engine(path, "cpu", backend="torch", optimize=False))


@pytest.mark.behaviour(91, 98)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_steps_in_pieces_give_the_cpus_text(pipeline: tuple[str, ...], tmp_path: Path) -> None:
    path = tiny_models.build("llama_deep", tmp_path, 0)
    pieces = {"scheduler.microbatches": 2, "scheduler.microbatch_tokens": 2}
    llm = engine(path, "cuda", **{"parallel.pipeline": pipeline, **pieces})
    for _ in range(2):
        assert tokens(llm) == on_the_cpu(path)
    whole = engine(path, "cuda", **{"parallel.pipeline": pipeline})
    assert tokens(llm, SEEDED) == tokens(whole, SEEDED)


@pytest.mark.behaviour(9, 43, 98)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("family", ["llama_tied", "gemma3", "qwen3", "gpt_oss"])
def test_stages_give_the_cpus_text(family: str, optimize: bool, pipeline: tuple[str, ...], tmp_path: Path) -> None:
    path = tiny_models.build(family, tmp_path, 0)
    llm = engine(path, "cuda", optimize=optimize, **{"parallel.pipeline": pipeline})
    assert llm.engine.asynchronous
    assert tokens(llm) == on_the_cpu(path)
    assert tokens(llm, SEEDED) == tokens(engine(path, "cuda:0", optimize=optimize), SEEDED)
    stages = llm.plan.stages
    model = llm.engine.runner.model
    for stage in stages:
        for layer in model.hf_model.base_model.layers[stage.first_layer : stage.end_layer]:
            assert {str(p.device) for p in layer.parameters()} == {stage.device}
    assert str(model.hf_model.lm_head.weight.device) == stages[-1].device
    on_device = [cache.key.device for cache in llm.engine.runner.router.caches()]
    assert {str(device) for device in on_device} == set(pipeline)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_torchs_backend_and_transformers_own_forward_cross_devices(pipeline: tuple[str, ...], tmp_path: Path) -> None:
    path = tiny_models.build("gemma2", tmp_path, 0)
    settings = {"parallel.pipeline": pipeline, "model_family.transformers_decoder.lean": False}
    llm = engine(path, "cuda", backend="torch", **settings)
    assert any("transformers' own forward" in note for note in llm.engine.notes)
    assert tokens(llm) == on_the_cpu(path)


@two_gpus
@pytest.mark.behaviour(142)
def test_the_tightest_device_sizes_the_pool(tmp_path: Path) -> None:
    """The first card is filled up to 2 GiB, less than its part of a pool for 4,096 requests of 512 tokens takes."""
    path = tiny_models.build("llama_deep", tmp_path, 0)
    held = torch.empty(torch.cuda.mem_get_info(0)[0] - 2**31, dtype=torch.uint8, device="cuda:0")
    settings = {"parallel.pipeline": BOTH, "parallel.layers": (3, 1), "graphs.mode": "none"}
    llm = engine(path, "cuda", memory=0.995, max_num_seqs=4096, max_model_len=512, **settings)
    report = llm.engine.memory
    assert report is not None
    first, second = report.devices
    assert (first.device, second.device) == BOTH
    assert first.block == 3 * second.block == 3 * 16 * 2 * (16 + 16) * 4
    assert 2**28 < first.cache + first.activations < 2**31 - 0.005 * first.total
    assert report.num_blocks < 4096 * 512 // 16
    assert second.cache == report.num_blocks * second.block
    del held


@two_gpus
def test_reloaded_weights_reach_every_stage(tmp_path: Path) -> None:
    paths = [tiny_models.build("llama_tied", tmp_path / str(seed), seed) for seed in (0, 1)]
    for optimize in (False, True):
        llm = engine(paths[0], "cuda", optimize=optimize, **{"parallel.pipeline": BOTH})
        assert tokens(llm) == on_the_cpu(paths[0])
        llm.update_config(model=paths[1])
        llm.reload_weights()
        assert tokens(llm) == on_the_cpu(paths[1])


@two_gpus
def test_a_drafter_and_log_probabilities_work_over_stages(tmp_path: Path) -> None:
    path = tiny_models.build("llama_deep", tmp_path, 0)
    settings = {"drafter.name": "ngram", "drafter.tokens": 3}
    scored = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    llm, one = engine(path, "cuda", **settings, **{"parallel.pipeline": BOTH}), engine(path, "cuda:0", **settings)
    assert tokens(llm) == tokens(one) == on_the_cpu(path)
    for ours, theirs in zip(llm.generate(PROMPTS, scored), one.generate(PROMPTS, scored), strict=True):
        assert ours.outputs[0].cumulative_logprob == pytest.approx(theirs.outputs[0].cumulative_logprob, abs=1e-3)
        assert [None if e is None else list(e) for e in ours.prompt_logprobs or ()] == [
            None if e is None else list(e) for e in theirs.prompt_logprobs or ()
        ]


@pytest.mark.parametrize(
    ("backend", "graphs", "drafter"),
    [
        ("torch", "none", ""),
        ("torch", "full_and_piecewise", ""),
        ("triton", "full_and_piecewise", ""),
        ("triton", "full_and_piecewise", "ngram"),
    ],
)
@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=two_gpus)])
def test_any_card_gives_the_cpus_text_with_and_without_graphs(
    device: str, backend: str, graphs: str, drafter: str, tmp_path: Path
) -> None:
    path = tiny_models.build("llama_deep", tmp_path, 0)
    gc.collect()  # engines of earlier tests
    before = torch.cuda.memory_allocated(0)
    llm = engine(path, device, backend=backend, **{"graphs.mode": graphs, "drafter.name": drafter})
    assert tokens(llm) == on_the_cpu(path)
    assert tokens(llm) == on_the_cpu(path)  # over cached prefixes
    assert (llm.engine.graphs is not None) == (graphs != "none")
    assert llm.engine.asynchronous == (not drafter)
    assert {str(cache.key.device) for cache in llm.engine.runner.router.caches()} == {device}
    if device == "cuda:1":
        assert torch.cuda.memory_allocated(0) == before


@two_gpus
def test_two_engines_on_two_cards_take_turns(tmp_path: Path) -> None:
    path = tiny_models.build("qwen3", tmp_path, 0)
    both = [engine(path, device) for device in BOTH]
    expected = on_the_cpu(path)
    for _ in range(2):
        assert [tokens(llm) for llm in both] == [expected, expected]


def test_graphs_are_cut_to_none_with_a_reason(tmp_path: Path) -> None:
    path = tiny_models.build("llama_deep", tmp_path, 0)
    llm = engine(path, "cuda", **{"parallel.pipeline": SAME})
    assert llm.plan.graphs.resolved == "none"
    assert [note.code for note in llm.plan.downgrades if note.key == "graphs.mode"] == ["N312"]
    with pytest.raises(NegotiationError, match="it runs over 2 pipeline stages"):
        engine(path, "cuda", **{"parallel.pipeline": SAME, "graphs.mode": "piecewise"})


def test_devices_that_are_not_there_are_refused(tmp_path: Path) -> None:
    path, count = tiny_models.build("llama_deep", tmp_path, 0), torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"'cuda:{count}' is not there: {count} CUDA device"):
        engine(path, "cuda", **{"parallel.pipeline": ("cuda:0", f"cuda:{count}")})
    with pytest.raises(ConfigError, match=f"there are {count} CUDA devices"):
        engine(path, "cuda", **{"parallel.pipeline": count + 1})
    with pytest.raises(ConfigError, match="which names one device"):
        engine(path, "cuda:0", **{"parallel.pipeline": 2})
