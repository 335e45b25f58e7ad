"""A small checkpoint of dummy weights, for the conformance suite."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from slotline.proposers.dflash.network import DFlashHead, read_config
from slotline.registry.contracts import DrafterContext

_LAYERS = 4
"""Layers of a model whose facts are not known."""


def write_example(folder: Path, context: DrafterContext) -> None:
    """Write a folder in the authors' form: two decoder layers over outputs of the first layer and the last but one."""
    layers = _LAYERS if context.facts is None else len(context.facts.layers)
    config = {
        "model_type": "qwen3",
        "block_size": 1 + context.num_tokens,
        "dflash_config": {"mask_token_id": context.vocab_size - 1, "target_layer_ids": [0, layers - 2]},
        "num_target_layers": layers,
        "num_hidden_layers": 2,
        "vocab_size": context.vocab_size,
        "hidden_size": context.hidden_size,
        "intermediate_size": 2 * context.hidden_size,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 2 * context.max_model_len,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    head, generator = DFlashHead(read_config(folder), num_states=2), torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones_like(weight)
        if weight.ndim == 1
        else torch.randn(weight.shape, generator=generator) * 2 * weight.shape[1] ** -0.5
        for name, weight in head.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors")
