"""Scales of an eight-bit KV cache, as quantisation tools publish them with the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.errors import ModelError

PLACES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("k_scale", "attn.k_scale", "k_proj.k_scale"), (0,)),
        **dict.fromkeys(("v_scale", "attn.v_scale", "v_proj.v_scale"), (1,)),
        "kv_scale": (0, 1),
    }
)
"""Names after the module's path, and what they scale: keys 0, values 1. As compressed-tensors (first), vLLM and
ModelOpt (last) write them, and the older name of one for both."""


def read(path: Path, layers: Sequence[AttentionLayer]) -> dict[int, tuple[float, float]]:
    """Return the scales (of keys, of values) of layers that have any, by layer index. A missing one of a pair is 1.

    Stored keys are ``key / scale``. Scales that are not positive count as uncalibrated, so as 1.

    Raises:
        ModelError: if a scale has more than one element, e.g. one per head or per channel.
    """
    wanted = {f"{layer.name}.{end}": (layer.index, places) for layer in layers for end, places in PLACES.items()}
    found: dict[int, list[float]] = {}
    for name, scale in _tensors(path, set(wanted)):
        if scale.numel() != 1:
            raise ModelError(
                f"{name} in {path} has shape {list(scale.shape)}: scales of single heads or channels are not served",
                fix="use a checkpoint with one scale for each layer's keys and values, or without scales",
            )
        index, places = wanted[name]
        pair = found.setdefault(index, [1.0, 1.0])
        for place in places:
            pair[place] = float(scale) if scale > 0 else 1.0
    return {index: (pair[0], pair[1]) for index, pair in sorted(found.items())}


def tensors(layers: Sequence[AttentionLayer], scales: Mapping[int, tuple[float, float]]) -> dict[str, torch.Tensor]:
    """Return scales as tensors, by names that `read` knows."""
    return {
        f"{layers[index].name}.{end}": torch.tensor(scale)
        for index, pair in scales.items()
        for end, scale in zip(("k_scale", "v_scale"), pair, strict=True)
    }


def _tensors(path: Path, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in sorted(names.intersection(opened.keys())):
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError):
            continue  # a broken file can be looked at and planned for; loading it says what is wrong
