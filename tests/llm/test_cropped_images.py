"""Phi-4 multimodal: transformers' own text over images in crops, its adapters, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_crops
import torch
from engine_driver import GREEDY
from tiny_crops import IMAGE_TOKEN, answer, image, oracle
from transformers.utils import is_torchvision_available

from slotline.core import LLM, LoRARequest
from slotline.registry.errors import RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Engines = Callable[..., LLM]
PROMPTS: Sequence[tuple[list[int], tuple[int, ...]]] = [
    ([330, IMAGE_TOKEN, 312, 10], (0,)),
    ([330, IMAGE_TOKEN, 312, IMAGE_TOKEN, IMAGE_TOKEN, 15, 16], (1, 2, 0)),
    ([330, 312, 10, 20, 21], ()),
    ([IMAGE_TOKEN, 40, 41, IMAGE_TOKEN], (3, 3)),
]
KIB_PER_TOKEN = 4 * 2 * (16 + 16) * 4 // 1024
ROOM: dict[str, Any] = {"max_model_len": 100, "memory": "16MiB"}
HARD: dict[str, dict[str, Any]] = {
    "chunks": {"scheduler.max_batched_tokens": 7, "scheduler.async": True},
    "whole": {},
    "drafts": {"scheduler.max_batched_tokens": 14, "drafter.name": "ngram"},
    "preemption": {"scheduler.max_batched_tokens": 11, "memory": f"{80 * KIB_PER_TOKEN}KiB", "max_model_len": 76},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_crops.build(tmp_path_factory.mktemp("crops") / "phi4")


def given(prompts: Sequence[tuple[list[int], tuple[int, ...]]]) -> list[Any]:
    return [
        {"prompt_token_ids": tokens, "multi_modal_data": {"image": [image(seed) for seed in seeds]}}
        for tokens, seeds in prompts
    ]


def texts(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.spread(1, slow=2)
@pytest.mark.parametrize("hard", HARD)
def test_crops_give_transformers_tokens(hard: str, path: Path, engines: Engines) -> None:
    llm = engines(path, block_size=4, **{**ROOM, **HARD[hard]})
    model = oracle(path)
    wanted = [answer(model, tokens, seeds, 20) for tokens, seeds in PROMPTS]
    outputs = llm.generate(given(PROMPTS), GREEDY, progress=False)
    assert texts(outputs) == wanted
    if hard == "preemption":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        return
    again = llm.generate(given(PROMPTS), GREEDY, progress=False)
    assert texts(again) == wanted
    assert all(output.metrics.num_cached_tokens > 0 for output in again)
    if hard == "drafts":
        assert llm.engine.extension("drafts").counts.proposed > 0


def test_an_adapter_from_the_checkpoint_gives_peft_s_text(path: Path, tmp_path: Path, engines: Engines) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        init_lora_weights=False,
        target_modules=r"model\.layers\.\d+\.(self_attn\.(qkv_proj|o_proj)|mlp\.(gate_up_proj|down_proj))",
    )
    adapted = peft.get_peft_model(oracle(path), config, adapter_name="vision-lora").eval()
    adapted.save_pretrained(tmp_path)
    llm = engines(path, block_size=4, **ROOM, **{"lora.name": "torch", "lora.max_rank": 4})
    request = LoRARequest("vision", 1, str(tmp_path / "vision-lora"))
    outputs = llm.generate(given(PROMPTS) * 2, GREEDY, lora_request=[request] * 4 + [None] * 4, progress=False)
    wanted = [answer(adapted, tokens, seeds, 20) for tokens, seeds in PROMPTS]
    with adapted.disable_adapter():
        plain = [answer(adapted, tokens, seeds, 20) for tokens, seeds in PROMPTS]
    assert texts(outputs) == wanted + plain
    assert wanted != plain


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"image": {**image(1), "image_sizes": torch.tensor([[16, 16]])}}, r"do not fit image_sizes = \[\[16, 16\]\]"),
        ({"image": {**image(1), "image_sizes": torch.tensor([[16, 20]])}}, r"multiples of 16"),
        (
            {"image": {**image(1), "image_attention_mask": torch.ones(1, 3, 2, 2)}},
            r"image_attention_mask \[1, 3, 2, 2\]",
        ),
        ({"image": {"image_sizes": [[16, 16]]}}, r"cannot be read: KeyError\('image_pixel_values'\)"),
        ({"audio": [0.0]}, "multi_modal_data has audio; this model takes image"),
    ],
)
def test_what_does_not_fit_is_refused(data: Any, message: str, path: Path, engines: Engines) -> None:
    llm = engines(path, block_size=4, **ROOM)
    with pytest.raises(RequestError, match=message):
        llm.generate({"prompt_token_ids": [330, IMAGE_TOKEN], "multi_modal_data": data}, GREEDY, progress=False)


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision reads the image")
def test_an_image_without_torchvision_is_refused(path: Path, engines: Engines) -> None:
    pillow = pytest.importorskip("PIL.Image")
    llm = engines(path, block_size=4, **ROOM)
    data = {"image": pillow.new("RGB", (20, 20))}
    with pytest.raises(RequestError, match="needs torchvision, which is not installed"):
        llm.generate({"prompt_token_ids": [330, IMAGE_TOKEN], "multi_modal_data": data}, GREEDY, progress=False)
