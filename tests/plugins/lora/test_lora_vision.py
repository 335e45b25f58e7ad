"""Adapters on the decoder of a model that sees images: PEFT's own text, with images and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_speech
import torch
import transformers
from tiny_vision import VARIANTS, image

from slotline.core import LLM, LoRARequest, SamplingParams
from slotline.registry.errors import NegotiationError, RequestError

pytest.importorskip("PIL", reason="image processors need Pillow")
pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [("def <image> main(", [0]), ("import os, sys", []), ("The quick <image> jumps over the <image>", [2, 1])]
DECODER = r".*language_model\.layers.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
LENGTH = 6
SETTINGS: dict[str, Any] = {"dtype": "float32", "backend": "torch", "max_model_len": 64, "max_num_seqs": 4}
LORA = {"lora.name": "torch", "lora.max_rank": 4, "memory": "8MiB", "scheduler.max_batched_tokens": 24}


class Oracle:
    """A checkpoint in transformers with one adapter of PEFT's."""

    def __init__(self, path: Path, folder: Path, **settings: Any) -> None:
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        base = transformers.AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False
        ).eval()
        config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **settings)
        self.model: Any = peft.get_peft_model(base, config, adapter_name="first").eval()
        self.model.save_pretrained(folder)
        self.processor = transformers.AutoProcessor.from_pretrained(path, trust_remote_code=False)
        self.request = LoRARequest("first", 1, str(folder / "first"))

    def greedy(self, text: str, seeds: list[int], *, adapted: bool) -> list[int]:
        """What the model says with the adapter or without."""
        inputs = self.processor(text=text, images=[image(seed) for seed in seeds] or None, return_tensors="pt")
        length = inputs["input_ids"].shape[1]

        def generate() -> Any:
            return self.model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)

        with torch.no_grad():
            if adapted:
                return generate()[0, length:].tolist()  # type: ignore[no-any-return]
            with self.model.disable_adapter():
                return generate()[0, length:].tolist()  # type: ignore[no-any-return]


@pytest.mark.spread(3)
@pytest.mark.parametrize("optimize", [False, True], ids=["plain", "passes"])
@pytest.mark.parametrize("name", VARIANTS)
def test_an_adapter_of_the_decoder_gives_peft_s_text_over_images(
    name: str, optimize: bool, tiny_vision_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tiny_vision_model(name)
    oracle = Oracle(path, tmp_path, target_modules=DECODER)
    llm = LLM(path, optimize=optimize, **SETTINGS, **LORA)
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [image(seed) for seed in seeds]}} for text, seeds in PROMPTS
    ]
    both = [*prompts, *prompts]
    adapted = [True] * len(prompts) + [False] * len(prompts)
    outputs = llm.generate(both, params, lora_request=[oracle.request if one else None for one in adapted])
    wanted = [oracle.greedy(text, seeds, adapted=one) for (text, seeds), one in zip(PROMPTS * 2, adapted, strict=True)]
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    assert wanted[: len(prompts)] != wanted[len(prompts) :]


def test_an_adapter_of_the_encoder_is_refused(tiny_vision_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = tiny_vision_model("llava")
    oracle = Oracle(path, tmp_path, target_modules=r".*vision_tower.*\.q_proj")
    with pytest.raises(RequestError, match=r"vision_tower.* belongs to no module that may carry an adapter"):
        LLM(path, **SETTINGS, **LORA).add_lora(oracle.request)


def test_a_model_that_takes_none_is_refused_with_its_family(tmp_path: Path) -> None:
    with pytest.raises(NegotiationError, match=r"'transformers_speech' lets no adapters join its models"):
        LLM(tiny_speech.build(tmp_path), **{"lora.name": "torch"})
