"""T5's relative positions: a learned bias of each head on the scores, by the distance between query and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slotline.plugins.model_families import weight_files
from slotline.registry.errors import ModelError

WEIGHT = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
"""The bias of a decoder's layers, [buckets, heads], which all of them share."""


def decoder_bias(path: Path, model: Any) -> tuple[tuple[float, ...], ...]:
    """Return the bias of each head in a checkpoint's decoder, by distance up to the greatest one that counts.

    Args:
        path: the folder.
        model: transformers' model, which may be without memory.

    Raises:
        ModelError: if the folder has no such weight.
    """
    name = f"decoder.{WEIGHT}"
    module = model.get_decoder().get_submodule(WEIGHT.removesuffix(".relative_attention_bias.weight"))
    most = module.relative_attention_max_distance
    buckets = module._relative_position_bucket(
        -torch.arange(most + 1),
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=most,
    )
    weight = _read(path, model.config, name)
    if weight is None or weight.shape != (module.relative_attention_num_buckets, module.n_heads):
        raise ModelError(
            f"{path} has no weight {name!r} of the shape that config.json says", fix="download the checkpoint again"
        )
    return tuple(map(tuple, weight.float()[buckets].T.tolist()))  # [heads, distances]


def leave_out(decoder: Any) -> None:
    """Let a decoder compute no biases, which would be as large as a batch's scores. Attention adds them."""
    for module in decoder.modules():
        if hasattr(module, "compute_bias"):
            module.has_relative_attention_bias = True  # or zeros of that size are made in its place
            module.compute_bias = _nothing


def _nothing(*_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(0)


def _read(path: Path, config: Any, name: str) -> torch.Tensor | None:
    """Return a tensor of a checkpoint, None if it is not there."""
    from safetensors import safe_open

    for file in weight_files.loaded_files(path, config):
        try:
            if file.suffix != ".safetensors":
                tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
                if name in tensors:
                    return tensors[name]  # type: ignore[no-any-return]
                continue
            with safe_open(file, framework="pt") as opened:
                if name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                    return opened.get_tensor(name)  # type: ignore[no-any-return]
        except Exception as error:  # readers of two formats, each with errors of its own
            raise weight_files.unreadable(path, error, file=file) from error
    return None
