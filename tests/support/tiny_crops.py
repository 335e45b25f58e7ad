"""A tiny random Phi-4 multimodal checkpoint, its images as its processor makes them, and transformers' own answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers

IMAGE_TOKEN, SOUND_TOKEN = 390, 391
SHAPES: tuple[tuple[int, int, int, int], ...] = ((1, 1, 4, 4), (1, 2, 4, 6), (2, 2, 6, 8), (2, 1, 7, 4))
"""Rows and columns of crops, and rows and columns of patches that are seen, of the image of each seed."""
_CROP, _PATCHES = 16, 4


def image(seed: int) -> dict[str, torch.Tensor]:
    """An image of noise, of a size that depends on the seed."""
    rows, columns, height, width = SHAPES[seed % len(SHAPES)]
    seen = torch.zeros(rows * _PATCHES, columns * _PATCHES)
    seen[:height, :width] = 1
    crops = seen.reshape(rows, _PATCHES, columns, _PATCHES).transpose(1, 2).reshape(-1, _PATCHES, _PATCHES)
    generator = torch.Generator().manual_seed(seed)
    return {
        "image_pixel_values": torch.randn((1, 1 + rows * columns, 3, _CROP, _CROP), generator=generator),
        "image_sizes": torch.tensor([[rows * _CROP, columns * _CROP]]),
        "image_attention_mask": torch.cat([torch.ones(1, _PATCHES, _PATCHES), crops])[None],
    }


def num_tokens(seed: int) -> int:
    """The number of an image's tokens: a place for two by two patches, an end for each row, one between the parts."""
    _, _, height, width = SHAPES[seed % len(SHAPES)]
    places = _PATCHES // 2
    return -(-height // 2) * (-(-width // 2) + 1) + 1 + places * (places + 1)


def build(path: Path) -> Path:
    """Write a random checkpoint with a tokenizer into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tiny_models.build_tokenizer(path)
    left = ("head_dim", "pad_token_id", "bos_token_id", "eos_token_id")
    sizes = {key: value for key, value in tiny_models._SIZES.items() if key not in left}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision |= {"image_size": _CROP, "crop_size": _CROP, "patch_size": _PATCHES, "image_token_id": IMAGE_TOKEN}
    sound = {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2, "input_size": 16}
    sound |= {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8}
    torch.manual_seed(0)
    config = transformers.Phi4MultimodalConfig(
        **{**sizes, "vocab_size": 392},
        vision_config=vision,
        audio_config={**sound, "audio_token_id": SOUND_TOKEN},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=[2],
    )
    model = transformers.Phi4MultimodalForCausalLM(config)
    tiny_models._widen(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return path


def oracle(path: Path) -> Any:
    """transformers' model of a folder.

    Its SDPA attends causally in the encoder where no patch is masked, so an image would depend on others in the batch.
    """
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()


def answer(model: Any, token_ids: Sequence[int], seeds: Sequence[int], max_tokens: int) -> list[int]:
    """transformers' greedy tokens after a prompt, in which each image is one token."""
    tokens, left = list[int](), list(seeds)
    for token in token_ids:
        tokens += [token] * num_tokens(left.pop(0)) if token == IMAGE_TOKEN else [token]
    found = [image(seed) for seed in seeds]
    most = max((item["image_pixel_values"].shape[1] for item in found), default=0)
    inputs: dict[str, Any] = {}
    for name in ("image_pixel_values", "image_attention_mask") if found else ():
        rows = [item[name] for item in found]
        fill = float(name == "image_attention_mask")
        padded = [torch.cat([row, row.new_full((1, most - row.shape[1], *row.shape[2:]), fill)], 1) for row in rows]
        inputs[name] = torch.cat(padded)
    if found:
        inputs["image_sizes"] = torch.cat([item["image_sizes"] for item in found])
    ids = torch.tensor([tokens])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, max_new_tokens=max_tokens, do_sample=False
        )
    return list(out[0, len(tokens) :].tolist())
