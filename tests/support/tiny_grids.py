"""Tiny random checkpoints of the Qwen-VL family, and what transformers itself answers on images of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tiny_models
import tiny_vision
import torch
import transformers
from transformers.utils import is_torchvision_available

VARIANTS: tuple[str, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_SIZES = {name: value for name, value in tiny_models._SIZES.items() if name != "head_dim"} | {"vocab_size": 392}
_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
SHAPES: tuple[tuple[int, int], ...] = ((16, 24), (24, 16), (32, 16), (16, 16))
"""Height and width of the image of each seed, over and over."""


def image(seed: int) -> Any:
    """A PIL image of noise, of a size that depends on the seed."""
    return tiny_vision.image(seed, *SHAPES[seed % len(SHAPES)])


def video(seed: int) -> dict[str, Any]:
    """A video of noise, as a video processor gives it, with a number of frames that depends on the seed."""
    grid = torch.tensor([[2 + seed % 2, 4, 6]])
    width = 3 * _PATCHES["temporal_patch_size"] * _PATCHES["patch_size"] ** 2
    patches = torch.randn((int(grid.prod()), width), generator=torch.Generator().manual_seed(seed))
    return {"pixel_values_videos": patches, "video_grid_thw": grid, "fps": 0.5 + seed}


def build(name: str, path: Path) -> Path:
    """Write a random checkpoint with tokenizer and image processor into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tiny_models.build_tokenizer(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    tokenizer.save_pretrained(path)
    tokens = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids(list(_SPECIAL)), strict=True))
    ids = {
        "image_token_id": tokens["<|image_pad|>"],
        "video_token_id": tokens["<|video_pad|>"],
        "vision_start_token_id": tokens["<|vision_start|>"],
        "vision_end_token_id": tokens["<|vision_end|>"],
    }
    torch.manual_seed(0)
    model = {
        "qwen2_vl": _qwen2,
        "qwen2_5_vl": _qwen2_5,
        "qwen3_vl": _qwen3,
        "qwen3_vl_moe": _qwen3_moe,
        "qwen3_5": _qwen3_5,
        "qwen3_5_moe": _qwen3_5_moe,
    }[name](ids)
    tiny_models._widen(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    kind = getattr(transformers, "Qwen2VLImageProcessorPil", transformers.Qwen2VLImageProcessor)
    settings = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 64, "max_pixels": 32 * 32}
    kind(**settings).save_pretrained(path)
    if is_torchvision_available():
        transformers.Qwen2VLVideoProcessor(**settings).save_pretrained(path)
    return path


def _qwen2(ids: dict[str, int]) -> Any:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config={**_SIZES, "rope_parameters": _ROPE}, vision_config={**vision, **_PATCHES}, **ids
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def _qwen2_5(ids: dict[str, int]) -> Any:
    vision = {"depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48}
    vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_SIZES, "rope_parameters": _ROPE}, vision_config={**vision, **_PATCHES}, **ids
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


_DEEP_VISION = {"depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48}
_DEEP_VISION |= {"num_position_embeddings": 16}
_STACKED: dict[str, Any] = {**_DEEP_VISION, **_PATCHES, "deepstack_visual_indexes": [0, 2]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def _qwen3(ids: dict[str, int]) -> Any:
    text = {**_SIZES, "head_dim": 16, "rope_parameters": _ROPE}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=_STACKED, **ids)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen3_moe(ids: dict[str, int]) -> Any:
    text = {**_SIZES, **_EXPERTS, "head_dim": 16, "rope_parameters": _ROPE}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=_STACKED, **ids)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 32,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
}


def _qwen3_5(ids: dict[str, int]) -> Any:
    config = transformers.Qwen3_5Config(
        text_config={**_SIZES, **_HYBRID}, vision_config={**_DEEP_VISION, **_PATCHES}, **ids
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _qwen3_5_moe(ids: dict[str, int]) -> Any:
    config = transformers.Qwen3_5MoeConfig(
        text_config={**_SIZES, **_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 48},
        vision_config={**_DEEP_VISION, **_PATCHES},
        **ids,
    )
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


@cache
def _oracle(path: Path) -> tuple[Any, Any, Any]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return model.eval(), tokenizer, transformers.AutoImageProcessor.from_pretrained(path, trust_remote_code=False)


def _expanded(model: Any, tokenizer: Any, token: int, grid: Sequence[int], fps: float | None) -> list[int]:
    """The tokens of an image or a video, with Qwen3-VL's times between pairs of frames if `fps` is given."""
    time, rows, columns = grid
    row = [token] * (rows * columns // 4)
    if fps is None:
        return row * time
    start, end = model.config.vision_start_token_id, model.config.vision_end_token_id
    said = [f"<{(2 * i / fps + (2 * i + 1) / fps) / 2:.1f} seconds>" for i in range(time)]
    return [one for text in said for one in [*tokenizer(text)["input_ids"], start, *row, end]]


def inputs_of(path: Path, text: str, seeds: Sequence[int], videos: Sequence[int]) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a prompt as the model reads them, and what else transformers' forward takes."""
    model, tokenizer, processor = _oracle(path)
    given = dict[str, Any]()
    if seeds:
        given |= processor(images=[image(seed) for seed in seeds], return_tensors="pt")
    if videos:
        shown = [video(seed) for seed in videos]
        given |= {name: torch.cat([one[name] for one in shown]) for name in ("pixel_values_videos", "video_grid_thw")}
        if "qwen2_5" in model.config.model_type:
            given["second_per_grid_ts"] = [2 / one["fps"] for one in shown]
    ids: list[int] = tokenizer(text)["input_ids"]
    kinds = {model.config.image_token_id: "image_grid_thw", model.config.video_token_id: "video_grid_thw"}
    for token, name in kinds.items():
        grids = iter(given[name].tolist() if name in given else [])
        timed = [one["fps"] for one in map(video, videos)] if "qwen3" in model.config.model_type else []
        times = iter(timed if name == "video_grid_thw" else [])
        ids = [
            one
            for i in ids
            for one in (_expanded(model, tokenizer, i, next(grids), next(times, None)) if i == token else [i])
        ]
    tokens = torch.tensor([ids])
    if given:
        image_token, video_token = kinds
        given["mm_token_type_ids"] = (tokens == image_token).int() + 2 * (tokens == video_token).int()
    return ids, given


@cache
def _answer(path: Path, text: str, seeds: tuple[int, ...], videos: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    model, (ids, given) = _oracle(path)[0], inputs_of(path, text, seeds, videos)
    tokens = torch.tensor([ids])
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        out = model.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **given
        )
    return tuple(out[0, len(ids) :].tolist())


def greedy_reference(
    path: Path, text: str, seeds: Sequence[int], max_tokens: int, videos: Sequence[int] = ()
) -> list[int]:
    """The tokens that transformers' greedy generation adds to a text with the images and videos of these seeds."""
    return list(_answer(path, text, tuple(seeds), tuple(videos), max_tokens))
