"""Tiny random checkpoints that see images, a few images, and what transformers itself answers on them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
import transformers

IMAGE_TOKEN = "<image>"
VARIANTS: tuple[str, ...] = ("llava", "llava_siglip_qwen2", "vipllava")
IMAGE_SIZE, PATCH_SIZE = 12, 4
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2
_SIZES = {**tiny_models._SIZES, "vocab_size": 392}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
    "initializer_range": 0.15,
}


def image(seed: int, height: int = 20, width: int = 30) -> Any:
    """A PIL image of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png_file(seed: int) -> bytes:
    """The image of a seed as a PNG file."""
    file = io.BytesIO()
    image(seed).save(file, "PNG")
    return file.getvalue()


def build(name: str, path: Path) -> Path:
    """Write a random checkpoint with tokenizer and processor into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tiny_models.build_tokenizer(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    torch.manual_seed(0)
    model = {"llava": _llava, "llava_siglip_qwen2": _llava_siglip, "vipllava": _vipllava}[name](token)
    tiny_models._widen(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    siglip = name == "llava_siglip_qwen2"
    transformers.LlavaProcessor(
        image_processor=_image_processor(),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="full" if siglip else "default",
        num_additional_image_tokens=0 if siglip else 1,
    ).save_pretrained(path)
    return path


@cache
def _oracle(path: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    return model.eval(), transformers.AutoProcessor.from_pretrained(path, trust_remote_code=False)


@cache
def _answer(path: Path, text: str, seeds: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    model, processor = _oracle(path)
    images = {"images": [image(seed) for seed in seeds]} if seeds else {}
    inputs = processor(text=text, return_tensors="pt", **images)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    return tuple(out[0, inputs["input_ids"].shape[1] :].tolist())


def greedy_reference(path: Path, text: str, seeds: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens that transformers' greedy generation adds to a text with the images of these seeds."""
    return list(_answer(path, text, tuple(seeds), max_tokens))


def _image_processor() -> Any:
    """CLIP's, in the form that needs no torchvision where transformers has both."""
    kind = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    return kind(size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})


def _llava(token: int) -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        text_config=transformers.LlamaConfig(**_SIZES),
        image_token_id=token,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    return transformers.LlavaForConditionalGeneration(config)


def _llava_siglip(token: int) -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**_VISION),
        text_config=transformers.Qwen2Config(**_SIZES),
        image_token_id=token,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration(config)


def _vipllava(token: int) -> Any:
    config = transformers.VipLlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        text_config=transformers.LlamaConfig(**_SIZES),
        image_token_id=token,
        vision_feature_layers=[-1, -2],
    )
    return transformers.VipLlavaForConditionalGeneration(config)
