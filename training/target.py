"""The model that draft heads are trained for, and the folders that heads are written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM


class Target:
    """The model that heads are trained for: its states, its embedding and its output projection, all frozen.

    Args:
        layer_ids: the layers, from 0, whose inputs a head reads.
    """

    def __init__(self, path: Path, device: str, layer_ids: tuple[int, ...]) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.model = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
            .to(device)
            .eval()
            .requires_grad_(False)
        )
        self.config, self.layer_ids = self.model.config, layer_ids

    @torch.no_grad()
    def states(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Of [b, t] tokens the last hidden states [b, t, size], and the inputs of the layers side by side."""
        wanted = bool(self.layer_ids)
        found = self.model.get_decoder()(windows, output_hidden_states=wanted, use_cache=False)
        last = found.last_hidden_state
        return last, torch.cat([found.hidden_states[layer] for layer in self.layer_ids], -1) if wanted else last[
            ..., :0
        ]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., size] of tokens."""
        embeddings: Tensor = self.model.get_input_embeddings()(tokens)
        return embeddings

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] of last hidden states."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file({name: value.cpu() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
