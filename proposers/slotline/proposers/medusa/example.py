"""Made-up Medusa heads, for the conformance suite."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from slotline.registry.contracts import DrafterContext


def write_example(folder: Path, context: DrafterContext) -> None:
    """Write a folder in the authors' form: a head for each draft token, with one block and its own projection."""
    heads, size = context.num_tokens, context.hidden_size
    generator, weights = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for head in range(heads):
        weights[f"{head}.0.linear.weight"] = torch.randn(size, size, generator=generator) * size**-0.5
        weights[f"{head}.0.linear.bias"] = torch.randn(size, generator=generator)
        weights[f"{head}.1.weight"] = torch.randn(context.vocab_size, size, generator=generator)
    save_file(weights, folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": heads, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
