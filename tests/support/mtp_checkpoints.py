"""Tiny checkpoints with a multi-token-prediction layer under its published names, and what such a layer drafts.

The reference is written in plain torch from the tensors as they are stored: nothing of ours runs in it, and of
transformers the model, its rotary angles and its scale of scores alone. Keys and values are expanded, and every expert
is a product of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import known_oracle
from torch.nn.functional import linear, silu

Weights = dict[str, torch.Tensor]
FAMILIES = ("qwen3_next", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen2")
"""Tiny families with such a layer; `qwen2` has it under the names of MiMo, which is a Qwen2 with such a layer."""


def build(folder: Path, model: Path, family: str, seed: int = 0) -> Path:
    """A copy of a tiny model's folder whose safetensors hold a random layer, too."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    layer = {
        name: torch.randn(shape, generator=generator) * (0.15 if len(shape) == 2 else 0.1) + _centre(name, family)
        for name, shape in _shapes(config, family).items()
    }
    stored = load_file(folder / "model.safetensors")
    save_file(stored | layer, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def names(family: str, num_layers: int = 4) -> tuple[str, str, str, str, str]:
    """Projection, norm of the embedding, norm of the hidden state, last norm, and the prefix of the decoder layer."""
    if family == "qwen3_next":
        return "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0."
    if family == "qwen2":
        own = "model.mtp_layers.0."
        return f"{own}input_proj", f"{own}token_layernorm", f"{own}hidden_layernorm", f"{own}final_layernorm", own
    own = f"model.layers.{num_layers}."
    return f"{own}eh_proj", f"{own}enorm", f"{own}hnorm", f"{own}shared_head.norm", own


def _centre(name: str, family: str) -> float:
    """Norms count from 1 on, but for Qwen3-Next's, which add 1 to the weight."""
    return 1.0 if "norm" in name and family != "qwen3_next" else 0.0


def _shapes(config: dict[str, Any], family: str) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    projection, embedding, state, last, own = names(family, config["num_hidden_layers"])
    shapes: dict[str, tuple[int, ...]] = {f"{projection}.weight": (hidden, 2 * hidden)}
    for norm in (embedding, state, last, f"{own}input_layernorm", f"{own}post_attention_layernorm"):
        shapes[f"{norm}.weight"] = (hidden,)
    attention = f"{own}self_attn."
    if "kv_lora_rank" in config:
        rank, plain, rotary = config["kv_lora_rank"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        queries = config["q_lora_rank"]
        shapes |= {
            f"{attention}q_a_proj.weight": (queries, hidden),
            f"{attention}q_a_layernorm.weight": (queries,),
            f"{attention}q_b_proj.weight": (heads * (plain + rotary), queries),
            f"{attention}kv_a_proj_with_mqa.weight": (rank + rotary, hidden),
            f"{attention}kv_a_layernorm.weight": (rank,),
            f"{attention}kv_b_proj.weight": (heads * (plain + config["v_head_dim"]), rank),
            f"{attention}o_proj.weight": (hidden, heads * config["v_head_dim"]),
        }
    else:
        size, kv_heads = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
        gated = 2 if family == "qwen3_next" else 1
        for part, out in (("q", heads * gated), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{attention}{part}_proj.weight"] = (out * size, hidden)
            if family == "qwen2":
                shapes[f"{attention}{part}_proj.bias"] = (out * size,)
        shapes[f"{attention}o_proj.weight"] = (hidden, heads * size)
        if family != "qwen2":
            shapes |= {f"{attention}q_norm.weight": (size,), f"{attention}k_norm.weight": (size,)}
    if "shared_head" in last:  # published as copies, and left aside
        shared = (f"{own}embed_tokens.weight", f"{own}shared_head.head.weight")
        shapes |= dict.fromkeys(shared, (config["vocab_size"], hidden))
    mlps = {f"{own}mlp.": config["intermediate_size"]}
    if family != "qwen2":
        experts = config.get("n_routed_experts") or config["num_experts"]
        mlps = {f"{own}mlp.experts.{index}.": config["moe_intermediate_size"] for index in range(experts)}
        mlps[f"{own}mlp.shared_expert{'' if family == 'qwen3_next' else 's'}."] = config["moe_intermediate_size"]
        shapes[f"{own}mlp.gate.weight"] = (experts, hidden)
        if family == "qwen3_next":
            shapes[f"{own}mlp.shared_expert_gate.weight"] = (1, hidden)
        else:
            shapes[f"{own}mlp.gate.e_score_correction_bias"] = (experts,)
    for prefix, size in mlps.items():
        shapes |= {f"{prefix}gate_proj.weight": (size, hidden), f"{prefix}up_proj.weight": (size, hidden)}
        shapes[f"{prefix}down_proj.weight"] = (hidden, size)
    return shapes


class Expected:
    """What the layer drafts for a text, computed without a cache."""

    def __init__(self, folder: Path, family: str) -> None:
        self.model, self.family = known_oracle(folder), family
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.names = names(family, self.config["num_hidden_layers"])
        self.read: list[tuple[list[int], torch.Tensor]] = []
        self.known: dict[tuple[int, ...], list[int]] = {}

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Drafts behind `tokens`, whose last one the model has not computed. They are computed once."""
        found = self.known.setdefault((*tokens,), [])
        if len(found) < count:
            found[:] = self._drafted(tokens, count)
        return found[:count]

    def _of_text(self, tokens: list[int]) -> torch.Tensor:
        """The model's last hidden states of a text that begins with `tokens`."""
        for text, hidden in self.read:
            if text[: len(tokens)] == tokens:
                return hidden
        hidden = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        self.read.append((tokens, hidden))
        return hidden

    def _drafted(self, tokens: list[int], count: int) -> list[int]:
        ids, embed = torch.tensor(tokens), self.model.get_input_embeddings()
        hidden = self._of_text(tokens[:-1])[: len(tokens) - 1]
        entered, out = embed(ids[1:]), list[int]()
        inputs = self.enter(entered, hidden)
        for _ in range(count):  # the whole sequence again: entries of guesses stand behind those of the text
            states = self.layer(inputs)
            out.append(int(self.model.get_output_embeddings()(states[-1]).argmax()))
            inputs = torch.cat([inputs, self.enter(embed(torch.tensor(out[-1:])), states[-1:])])
        return out

    def enter(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the decoder layer reads, [n, hidden_size]."""
        projection, embedding, state, _, _ = self.names
        both = [self._norm(embeddings, embedding), self._norm(hidden, state)]
        return linear(torch.cat(both[::-1] if self.family == "qwen2" else both, -1), self._of(projection))

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        """The decoder layer over a whole sequence [n, hidden_size], and the norm behind it."""
        last, own = self.names[3:]
        attend = self._latent_attention if "kv_lora_rank" in self.config else self._attention
        x = x + attend(self._norm(x, f"{own}input_layernorm"), f"{own}self_attn.")
        mlp: Callable[[torch.Tensor, str], torch.Tensor] = {
            "qwen2": self._mlp,
            "qwen3_next": self._gated_experts,
        }.get(self.family, self._grouped_experts)
        x = x + mlp(self._norm(x, f"{own}post_attention_layernorm"), f"{own}mlp.")
        return self._norm(x, last)

    def _of(self, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"]

    def _norm(self, x: torch.Tensor, name: str, eps: float = 0.0) -> torch.Tensor:
        weight = self._of(name) + (1.0 if self.family == "qwen3_next" else 0.0)
        scale = (x.pow(2).mean(-1, keepdim=True) + (eps or self.config["rms_norm_eps"])).rsqrt()
        return x * scale * weight

    def _rotate(self, x: torch.Tensor, *, pairs: bool) -> torch.Tensor:
        """[n, heads, d] with its first numbers turned by their place in the sequence: halves, or neighbours."""
        cosines, sines = (t[0, :, None] for t in self.model.base_model.rotary_emb(x, torch.arange(len(x))[None]))
        size = cosines.shape[-1]
        cosines, sines = cosines[..., : size // 2], sines[..., : size // 2]
        turned, rest = x[..., :size], x[..., size:]
        a, b = (turned[..., ::2], turned[..., 1::2]) if pairs else turned.chunk(2, -1)
        # where neighbours are turned the numbers come out as halves: queries and keys alike, so scores do not change
        return torch.cat([a * cosines - b * sines, b * cosines + a * sines, rest], -1)

    def _scores(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.model.base_model.layers[-1].self_attn.scaling
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)

    def _attention(self, x: torch.Tensor, own: str) -> torch.Tensor:
        heads, n = self.config["num_attention_heads"], len(x)
        query, key, value = (
            linear(x, self._of(f"{own}{part}_proj"), self.weights.get(f"{own}{part}_proj.bias")) for part in "qkv"
        )
        size = key.shape[1] // self.config["num_key_value_heads"]
        query, key, value = query.view(n, heads, -1), key.view(n, -1, size), value.view(n, -1, size)
        query, gate = query[..., :size], query[..., size:]
        if f"{own}q_norm.weight" in self.weights:
            query, key = self._norm(query, f"{own}q_norm"), self._norm(key, f"{own}k_norm")
        out = self._scores(self._rotate(query, pairs=False), self._rotate(key, pairs=False), value)
        if gate.numel():
            out = out * gate.sigmoid()
        return linear(out.flatten(1), self._of(f"{own}o_proj"))

    def _latent_attention(self, x: torch.Tensor, own: str) -> torch.Tensor:
        config, n = self.config, len(x)
        heads, plain, rank = config["num_attention_heads"], config["qk_nope_head_dim"], config["kv_lora_rank"]
        pairs = config.get("rope_interleave", True)
        query = linear(x, self._of(f"{own}q_a_proj"))
        query = linear(self._norm(query, f"{own}q_a_layernorm", 1e-6), self._of(f"{own}q_b_proj")).view(n, heads, -1)
        both = linear(x, self._of(f"{own}kv_a_proj_with_mqa"))
        latent, rotary = self._norm(both[:, :rank], f"{own}kv_a_layernorm", 1e-6), both[:, None, rank:]
        expanded = linear(latent, self._of(f"{own}kv_b_proj")).view(n, heads, -1)
        turned_query, turned_key = (self._rotate(t, pairs=pairs) for t in (query[..., plain:], rotary))
        key = torch.cat([expanded[..., :plain], turned_key.expand(-1, heads, -1)], -1)
        out = self._scores(torch.cat([query[..., :plain], turned_query], -1), key, expanded[..., plain:])
        return linear(out.flatten(1), self._of(f"{own}o_proj"))

    def _mlp(self, x: torch.Tensor, own: str) -> torch.Tensor:
        gated = silu(linear(x, self._of(f"{own}gate_proj"))) * linear(x, self._of(f"{own}up_proj"))
        return linear(gated, self._of(f"{own}down_proj"))

    def _gated_experts(self, x: torch.Tensor, own: str) -> torch.Tensor:
        """Qwen3-Next's: the softmax's largest, and a shared expert under a gate of its own."""
        shares, chosen = linear(x, self._of(f"{own}gate")).softmax(-1).topk(self.config["num_experts_per_tok"])
        shares = shares / shares.sum(-1, keepdim=True)
        shared = linear(x, self._of(f"{own}shared_expert_gate")).sigmoid() * self._mlp(x, f"{own}shared_expert.")
        return self._chosen(x, own, shares, chosen) + shared

    def _grouped_experts(self, x: torch.Tensor, own: str) -> torch.Tensor:
        """DeepSeek-V3's (section 2.1.2): sigmoid scores, a bias that only chooses, groups first, one shared expert."""
        config, scores = self.config, linear(x, self._of(f"{own}gate")).sigmoid()
        biased = scores + self.weights[f"{own}gate.e_score_correction_bias"]
        groups = biased.view(len(x), config["n_group"], -1)
        best = groups.topk(2).values.sum(-1).topk(config["topk_group"]).indices
        open_ = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        biased = groups.masked_fill(~open_[..., None], 0.0).flatten(1)
        chosen = biased.topk(config["num_experts_per_tok"]).indices
        shares = scores.gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        return self._chosen(x, own, shares, chosen) + self._mlp(x, f"{own}shared_experts.")

    def _chosen(self, x: torch.Tensor, own: str, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.config.get("n_routed_experts") or self.config["num_experts"]):
            share = shares.masked_fill(chosen != expert, 0.0).sum(-1, keepdim=True)  # [n, 1]
            out += share * self._mlp(x, f"{own}experts.{expert}.")
        return out


@cache
def expected_of(folder: Path, family: str) -> Expected:
    """Return `Expected(folder, family)`, made once. The folder must not be written again."""
    return Expected(folder, family)
