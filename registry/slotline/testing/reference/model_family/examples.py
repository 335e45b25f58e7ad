"""Examples of the reference family, and what they must give: the same model over whole texts, in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from attrs import asdict

from slotline.registry.contracts.family_example import FamilyExample
from slotline.testing.reference.model_family.descriptor import ARCHITECTURE
from slotline.testing.reference.model_family.family import FILE, Config, layers_of, read_config, shapes_of

CONFIGS: Mapping[str, Config] = MappingProxyType(
    {
        "grouped heads": Config(),
        "windows, caps and sinks": Config(num_layers=4, num_kv_heads=4, window=5, soft_cap=9, sinks=1, tied=1),
        "shared caches": Config(num_layers=4, num_kv_heads=1, shared=2, vocab_size=64),
        "sounds": Config(sounds=1),
        "embeddings": Config(),
    }
)


def write(config: Config, folder: Path, seed: int) -> None:
    """Write a checkpoint with random weights."""
    from safetensors.torch import save_file

    content = {"architectures": [ARCHITECTURE], **asdict(config)}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes_of(config).items():
        drawn = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            drawn = drawn * (1.5 / shape[1] ** 0.5 if name != "embedding" else 1.0)
        weights[name] = 1 + drawn / 3 if "norm" in name else drawn
    save_file(weights, folder / FILE)


def sound(number: int) -> tuple[str, Any]:
    """Return a sound."""
    return "sound", [float(torch.tensor(number * 7.0 + place).sin()) for place in range(5 + number // 2 % 4)]


def expected(folder: Path, token_ids: Sequence[int], item: Any, *, logits: bool = True) -> torch.Tensor:
    """Return the logits of a text, or the last hidden states, by dense attention over the whole of it in float64."""
    from safetensors.torch import load_file

    config, size = read_config(folder), len(token_ids)
    weights = {name: tensor.double() for name, tensor in load_file(folder / FILE).items()}
    place = torch.arange(size)
    hidden, kept = weights["embedding"][list(token_ids)], {}
    for index, layer in enumerate(layers_of(config)):
        own = {name.split(".")[2]: t for name, t in weights.items() if name.startswith(f"layers.{index}.")}
        x = _unit(hidden) * own["norm"]
        query = _turned((x @ own["query"].T + own["query_bias"]).view(size, config.num_heads, -1), place)
        if layer.shares_kv_with is None:
            key = _turned((x @ own["key"].T).view(size, config.num_kv_heads, -1), place)
            kept[index] = key, (x @ own["value"].T + own["value_bias"]).view(size, config.num_kv_heads, -1)
        keys, values = kept[index if layer.shares_kv_with is None else layer.shares_kv_with]
        out = torch.zeros_like(query)
        for head in range(config.num_heads):
            source = head * config.num_kv_heads // config.num_heads
            scores = query[:, head] @ keys[:, source].T / config.head_size**0.5
            if config.soft_cap:
                scores = config.soft_cap * (scores / config.soft_cap).tanh()
            hides = place[None, :] > place[:, None]
            if layer.window:
                hides = hides | (place[:, None] - place[None, :] >= layer.window)
            scores = scores.masked_fill(hides, float("-inf"))
            if config.sinks:
                scores = torch.cat((scores, own["sinks"][head].expand(size, 1)), 1)
            out[:, head] = scores.softmax(-1)[:, :size] @ values[:, source]
        hidden = hidden + out.flatten(1) @ own["out"].T
        gate, up = (_unit(hidden) * own["norm_mlp"] @ own["up"].T).chunk(2, -1)
        hidden = hidden + (gate * gate.sigmoid() * up) @ own["down"].T
    hidden = _unit(hidden) * weights["norm"]
    head = weights["embedding" if config.tied else "head"]
    answers: torch.Tensor = hidden @ head.T if logits else hidden
    return answers


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _turned(heads: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return heads whose pairs of numbers are turned as complex numbers."""
    half = heads.shape[-1] // 2
    speeds = 100.0 ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones(len(place), 1, half).double(), place[:, None, None] * speeds)
    turned = torch.complex(heads[..., :half], heads[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), -1)


EXAMPLES: Mapping[str, FamilyExample] = MappingProxyType(
    {
        name: FamilyExample(
            write=partial(write, config),
            task="embed" if name == "embeddings" else "generate",
            item=sound if config.sounds else None,
            expected=None if config.sounds else partial(expected, logits=name != "embeddings"),
            unread=("head",) if name == "embeddings" else (),
        )
        for name, config in CONFIGS.items()
    }
)
