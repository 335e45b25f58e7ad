"""The network of DFlash (Chen, Liang and Liu 2026, arXiv 2602.06036), and its published folders.

The head's keys and values of known tokens come from the target's hidden states: the outputs of several layers, side by
side, go through `fc` and a norm, and each layer projects them ("KV injection"). A proposal is one pass over a block:
the newest token and a mask token for each draft. All tokens of the block see the known ones and each other. The output
at a mask is the draft of its position. Embedding and output projection are the target's.

Attention is the caller's: a served head attends over its cache, a head in training over a window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import rotate_half

from slotline.proposers.eagle.heads import MLP, Attend, Head, HeadConfig, merge, refuse_turns
from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_KNOWN = {"mask_token_id", "target_layer_ids", "block_size"}
"""What is read of the table `dflash_config`. Other entries change the network, so they are refused."""


@frozen(kw_only=True, eq=False)
class DFlashConfig:
    """Settings in a folder's config.json.

    Attributes:
        path: the folder.
        llama: its decoder layers, a Llama's with norms of queries and keys.
        mask_token_id: the token that stands at the places to draft.
        block_size: tokens of the blocks that it was trained with, the newest one included.
        layer_ids: the target's layers, from 0, whose outputs it reads.
        windows: for each layer, the keys that a query sees, itself included. None for all.
        num_target_layers: layers of the target. None if it is not said.
    """

    path: Path
    llama: LlamaConfig
    mask_token_id: int
    block_size: int
    layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    num_target_layers: int | None = None


def read_config(path: Path) -> DFlashConfig:
    """Read config.json.

    Raises:
        ModelError: if the folder has none that can be read, or if it asks for what is not implemented.
    """
    file = path / "config.json"
    try:
        settings = read_json(file)
        return _read(path, settings)
    except Exception as error:  # transformers' dataclass validators raise many kinds
        raise ModelError(
            f"{str(file)!r} does not describe a DFlash head: {error}",
            fix="set drafter.path to a folder with the config.json and weights of a DFlash head",
        ) from error


def _read(path: Path, settings: dict[str, Any]) -> DFlashConfig:
    own = settings.get("dflash_config")
    missing = [name for name in _SIZES if not isinstance(settings.get(name), int)]
    if missing or not isinstance(own, dict):
        raise ValueError(f"{', '.join(missing) or 'dflash_config'} missing")
    if strange := sorted(name for name in own if name not in _KNOWN and own[name] not in (None, False)):
        raise ValueError(f"dflash_config has {strange[0]} = {own[strange[0]]!r}, which is not implemented")
    if (hidden_act := settings.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act is {hidden_act!r}, and 'silu' is implemented")
    if (draft := settings.get("draft_vocab_size") or settings["vocab_size"]) != settings["vocab_size"]:
        raise ValueError(f"draft_vocab_size is {draft}, and the target's whole vocabulary is drafted")
    usual = {"partial_rotary_factor": 1.0, "quantization_config": None, "target_hidden_size": settings["hidden_size"]}
    for name, value in usual.items():
        if (said := settings.get(name)) not in (None, value):
            raise ValueError(f"{name} is {said!r}, and heads with {value or 'none'} are read")
    refuse_turns(settings)
    layers, targets = settings["num_hidden_layers"], settings.get("num_target_layers")
    windows = _windows(settings, layers)
    ids = own.get("target_layer_ids")
    if ids is None:
        ids = _spread(targets, layers)
    block_size = own.get("block_size") or settings.get("block_size")
    for name, value in (("mask_token_id", own.get("mask_token_id")), ("block_size", block_size)):
        if not isinstance(value, int):
            raise ValueError(f"{name} is {value!r}")
    unread = ("model_type", "architectures", "dtype", "layer_types", "dflash_config")
    return DFlashConfig(
        path=path,
        llama=LlamaConfig(**{key: value for key, value in settings.items() if key not in unread}),
        mask_token_id=own["mask_token_id"],
        block_size=int(block_size),  # type: ignore[arg-type]  # checked
        layer_ids=tuple(map(int, ids)),
        windows=windows,
        num_target_layers=targets,
    )


def _windows(settings: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: as `layer_types` say or, without them, of those from `max_window_layers` on.

    Raises:
        ValueError: if the settings contradict each other.
    """
    kinds, window, used = (
        settings.get("layer_types"),
        settings.get("sliding_window"),
        settings.get("use_sliding_window"),
    )
    if kinds is None:
        first = settings.get("max_window_layers", 28) if used else layers  # Qwen3's default
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    elif used is False and "sliding_attention" in kinds:
        raise ValueError(f"layer_types are {kinds}, and use_sliding_window is False")
    if len(kinds) != layers or {*kinds} - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types are {kinds} for num_hidden_layers = {layers}")
    if "sliding_attention" in kinds and not isinstance(window, int):
        raise ValueError(f"sliding_window is {window!r}, and layers have one")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _spread(num_target_layers: object, num_layers: int) -> list[int]:
    """Return the layers that the authors read where none are named: from the second to the third last, evenly."""
    if not isinstance(num_target_layers, int):
        raise ValueError("target_layer_ids and num_target_layers missing")
    if num_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_layers - 1)) for i in range(num_layers)]


class BlockSelfAttention(nn.Module):
    """Projections, norms of queries and keys, and rotary positions around the caller's attention."""

    merged: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_size = layer, int(config.head_dim)
        self.queries, self.keys = config.num_attention_heads * self.head_size, self._of_keys(config)
        size, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(size, self.queries, bias=bias)
        self.k_proj = nn.Linear(size, self.keys, bias=bias)
        self.v_proj = nn.Linear(size, self.keys, bias=bias)
        self.o_proj = nn.Linear(self.queries, size, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_size, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_size, eps=config.rms_norm_eps)

    def merge(self) -> None:
        """Merge the products of the same input."""
        self.merged = merge(self.q_proj, self.k_proj, self.v_proj)

    def context(
        self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [n, num_kv_heads, head_size] of known tokens, whose states are [n, hidden_size]."""
        if self.merged is None:
            key, value = self.k_proj(states), self.v_proj(states)
        else:
            weight, bias = self.merged
            found = functional.linear(states, weight[self.queries :], None if bias is None else bias[self.queries :])
            key, value = found.split(self.keys, -1)
        return self._turned(self.k_norm(self._heads(key)), rotary), self._heads(value)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """Map tokens of blocks [n, hidden_size] to the same. `rotary` are cosines and sines [n, head_size]."""
        if self.merged is None:
            query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        else:
            query, key, value = functional.linear(x, *self.merged).split([self.queries, self.keys, self.keys], -1)
        query = self._turned(self.q_norm(self._heads(query)), rotary)
        key = self._turned(self.k_norm(self._heads(key)), rotary)
        out: torch.Tensor = self.o_proj(attend(self.layer, query, key, self._heads(value)).flatten(1))
        return out

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = states.unflatten(-1, (-1, self.head_size))
        return heads

    @staticmethod
    def _of_keys(config: LlamaConfig) -> int:
        return int(config.num_key_value_heads * config.head_dim)

    @staticmethod
    def _turned(heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cosines, sines = (part[:, None] for part in rotary)
        turned: torch.Tensor = heads * cosines + rotate_half(heads) * sines
        return turned


class DFlashLayer(nn.Module):
    """Decoder layer of a block."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = BlockSelfAttention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """Map [n, hidden_size] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashHead(Head):
    """Decoder layers over blocks, and the projection of the target's states into their context."""

    def __init__(self, config: DFlashConfig, *, num_states: int) -> None:
        super().__init__(HeadConfig(path=config.path, llama=config.llama, draft_vocab_size=config.llama.vocab_size))
        size, eps = config.llama.hidden_size, config.llama.rms_norm_eps
        self.layers = nn.ModuleList(DFlashLayer(config.llama, i) for i in range(config.llama.num_hidden_layers))
        self.norm = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(num_states * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)

    def merge(self) -> None:
        """Merge products of the same input, once the head is on its device."""
        super().merge()
        for layer in self.layers:
            layer.self_attn.merge()  # type: ignore[union-attr,operator]

    def context(self, states: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each layer, keys and values [n, num_kv_heads, head_size] of known tokens.

        Args:
            states: [n, layers * hidden_size], outputs of the target's layers side by side.
            positions: [n] int64.
        """
        fused = self.hidden_norm(self.fc(states))
        rotary = self.positions(positions, fused)
        return [layer.self_attn.context(fused, rotary) for layer in self.layers]  # type: ignore[union-attr,operator]

    def forward(self, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Map the tokens of blocks [n, hidden_size] at positions [n] to what the output projection reads."""
        rotary, x = self.positions(positions, embeddings), embeddings
        for layer in self.layers:
            x = layer(x, rotary, attend)
        out: torch.Tensor = self.norm(x)
        return out
