"""The whole road on a GPU: the same text as on the CPU, and a pool sized by the card. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch

from slotline.core import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [[5, 6, 7, 8] * 8, [9, 10, 11], list(range(20, 60)), [5, 6, 7, 8] * 8 + [3]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    """float32 means float32 here, not tf32."""
    torch.set_float32_matmul_precision("highest")


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def engine(path: Path, device: str, **settings: object) -> LLM:
    options = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 32, "memory": "64MiB"}
    return LLM(model=str(path), device=device, **{**options, **settings, "observability.check_integrity": True})


@pytest.mark.parametrize("family", ["llama_deep", "qwen3", "gemma2", "gemma3", "mistral", "gpt_oss", "phi3"])
def test_greedy_text_on_the_gpu_equals_the_cpus(family: str, tmp_path: Path) -> None:
    path = tiny_models.build(family, tmp_path, 0)
    gpu = engine(path, "cuda")
    assert {group.backend for group in gpu.plan.groups} == {"triton"}
    assert tokens(gpu) == tokens(engine(path, "cpu", backend="torch"))


@pytest.mark.behaviour(23, 30, 88)
def test_seeded_text_on_the_gpu_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    path = tiny_models.build("llama_deep", tmp_path, 0)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True)
    together = tokens(engine(path, "cuda"), params)
    alone = engine(path, "cuda")
    assert together == [alone.generate([p], params)[0].outputs[0].token_ids for p in PROMPTS]


@pytest.mark.behaviour(142)
def test_the_pool_takes_the_share_of_the_card_that_is_asked_for(tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    if total - free > 0.02 * total:
        pytest.skip("other programs hold memory of this card, and their share counts")
    path = tiny_models.build("llama_deep", tmp_path, 0)
    llm = engine(path, "cuda", memory=0.05, max_num_seqs=4096)
    total = torch.cuda.get_device_properties(0).total_memory
    report = llm.engine.memory
    assert report is not None
    assert report.total == total
    assert 0.5 * 0.05 * total < report.cache + report.activations <= 0.05 * total or report.num_blocks == 4096 * 8 + 1


def test_bfloat16_generates_on_the_gpu(tmp_path: Path) -> None:
    llm = LLM(device="cuda")  # the small model that ships
    text = llm.generate("def main(", SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
    assert llm.plan.dtype == "bfloat16"
    assert ")" in text


@pytest.mark.behaviour(85, 86)
def test_images_on_the_gpu_give_the_cpus_text_and_decode_steps_keep_their_graphs(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    import tiny_vision

    path = tiny_vision.build("llava", tmp_path)
    prompts = [("def <image> main(", [0]), ("class Row <image><image> pass", [1, 0]), ("import os", [])]
    asked = [
        {"prompt": text, "multi_modal_data": {"image": [tiny_vision.image(seed) for seed in seeds]}}
        for text, seeds in prompts
    ]
    gpu = engine(path, "cuda")
    assert gpu.engine.graphs is not None
    original, replays = gpu.engine.graphs.replay, []
    gpu.engine.graphs.replay = lambda inputs: (replays.append(inputs.embeds), original(inputs))[1]  # type: ignore
    found = [output.outputs[0].token_ids for output in gpu.generate(asked, GREEDY)]
    assert found == [tiny_vision.greedy_reference(path, text, seeds, 24) for text, seeds in prompts]
    assert len(replays) >= 23
    assert not any(replays)
