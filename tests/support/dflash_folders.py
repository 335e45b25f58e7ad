"""Folders of untrained DFlash heads for a model, and what such a head drafts when nothing is cached."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import known_oracle
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

MASK, LAYERS = 7, (0, 2)
HEADS, KV_HEADS, SIZE, MLP_SIZE = 4, 2, 16, 48


def build(folder: Path, model: Path, seed: int = 0, layers: int = 2, **changes: Any) -> Path:
    """A folder as the authors of DFlash publish them, with random weights."""
    target = json.loads((model / "config.json").read_text())
    target = target.get("text_config", target)
    hidden, heads = target["hidden_size"], (HEADS * SIZE, KV_HEADS * SIZE)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(LAYERS)},
        "num_hidden_layers": layers,
        "num_target_layers": target["num_hidden_layers"],
        "vocab_size": target["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": MLP_SIZE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
    }
    shapes = {"fc.weight": (hidden, len(LAYERS) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(layers):
        own = {
            "self_attn.q_proj.weight": (heads[0], hidden),
            "self_attn.k_proj.weight": (heads[1], hidden),
            "self_attn.v_proj.weight": (heads[1], hidden),
            "self_attn.o_proj.weight": (hidden, heads[0]),
            "self_attn.q_norm.weight": (SIZE,),
            "self_attn.k_norm.weight": (SIZE,),
            "mlp.gate_proj.weight": (MLP_SIZE, hidden),
            "mlp.up_proj.weight": (MLP_SIZE, hidden),
            "mlp.down_proj.weight": (hidden, MLP_SIZE),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) / 6 + (1 if len(shape) == 1 else 0)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


class Expected:
    """What the head in a folder drafts for a model's text: the formulas of arXiv 2602.06036, without a cache.

    It shares no code with the drafter: rotary positions and their configuration are transformers'.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.model, self.weights = known_oracle(model), load_file(folder / "model.safetensors")
        settings = json.loads((folder / "config.json").read_text())
        self.own, self.windows = settings["dflash_config"], [None] * settings["num_hidden_layers"]
        if settings.get("layer_types"):
            sliding = [kind == "sliding_attention" for kind in settings["layer_types"]]
            self.windows = [settings["sliding_window"] if one else None for one in sliding]
        known = {k: v for k, v in settings.items() if k not in ("architectures", "dflash_config", "layer_types")}
        self.rotary = Qwen3RotaryEmbedding(Qwen3Config(**known))
        self.states: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Drafts behind `tokens`, whose last one the model has not computed."""
        last, get = len(tokens) - 1, self.weights.__getitem__
        masks = [self.own["mask_token_id"]] * count
        x = self.model.get_input_embeddings()(torch.tensor([tokens[-1], *masks]))
        context = self._norm(self._of_text(tokens)[:last] @ get("fc.weight").T, "hidden_norm.weight")
        places = torch.arange(last + 1 + count)
        cosines, sines = self.rotary(x, places[None])
        for i, window in enumerate(self.windows):
            name = f"layers.{i}"
            normed = self._norm(x, f"{name}.input_layernorm.weight")
            both = torch.cat([context, normed])
            query, key, value = (
                (states @ get(f"{name}.self_attn.{kind}_proj.weight").T).view(len(states), -1, SIZE)
                for kind, states in (("q", normed), ("k", both), ("v", both))
            )
            query = self._norm(query, f"{name}.self_attn.q_norm.weight").transpose(0, 1)[None]
            key = self._norm(key, f"{name}.self_attn.k_norm.weight").transpose(0, 1)[None]
            query, _ = apply_rotary_pos_emb(query, query, cosines[:, last:], sines[:, last:])
            key, _ = apply_rotary_pos_emb(key, key, cosines, sines)
            seen = torch.ones(1 + count, len(places), dtype=torch.bool)
            if window is not None:
                seen = places > places[last:, None] - window
            out = functional.scaled_dot_product_attention(
                query, key, value.transpose(0, 1)[None], attn_mask=seen, enable_gqa=True
            )
            x = x + out[0].transpose(0, 1).flatten(1) @ get(f"{name}.self_attn.o_proj.weight").T
            normed = self._norm(x, f"{name}.post_attention_layernorm.weight")
            gate, up = (normed @ get(f"{name}.mlp.{kind}_proj.weight").T for kind in ("gate", "up"))
            x = x + (functional.silu(gate) * up) @ get(f"{name}.mlp.down_proj.weight").T
        logits = self.model.get_output_embeddings()(self._norm(x[1:], "norm.weight"))
        return [int(token) for token in logits.argmax(-1)]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name], 1e-5)

    def _of_text(self, tokens: list[int]) -> torch.Tensor:
        """The target's states that the head reads, at all places of a text that begins with `tokens`."""
        for text, states in self.states.items():
            if list(text[: len(tokens)]) == tokens:
                return states
        found = self.model(torch.tensor(tokens)[None], output_hidden_states=True).hidden_states
        read = torch.cat([found[1 + layer][0] for layer in self.own["target_layer_ids"]], -1)
        self.states[tuple(tokens)] = read
        return read


@cache
def expected_of(folder: Path, model: Path) -> Expected:
    """Return `Expected(folder, model)`, made once. The folder must not be written again."""
    return Expected(folder, model)
