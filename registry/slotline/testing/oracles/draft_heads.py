"""Published draft heads in float64: networks of EAGLE, EAGLE-3, DFlash and Medusa by their definition, and examples.

Sources: EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-3 (Li et al. 2025, arXiv 2503.01840) with their repository's
``cnets.py`` and ``cnets1.py``, DFlash (Chen, Liang and Liu 2026, arXiv 2602.06036), Medusa (Cai et al. 2024, arXiv
2401.10774), and vLLM's readers of their folders for the fields that the authors do not write. A whole history is
computed for each token: there is no cache. Turning angles of positions are transformers', which defines the forms of
`rope_parameters`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch.nn import functional

Tensors = Mapping[str, torch.Tensor]
Settings = Mapping[str, Any]
FORMS = ("eagle", "eagle3", "dflash", "medusa")
"""Published forms of a draft head's folder that the suite knows."""
NUM_LAYERS = 4
"""Layers of the model that examples are for."""
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
}


@frozen(kw_only=True, eq=False)
class TargetModel:
    """What a head shares with its model.

    Attributes:
        table: embedding and output projection, [vocab_size, hidden_size].
        state: returns the hidden state [hidden_size] of the last of some tokens, in front of a layer, or behind the
            last one for -1. Of Medusa it is asked for a whole history, and gives the state that the newest token came
            from.
        num_layers: number of layers.
        max_model_len: most positions.
    """

    table: torch.Tensor
    state: Callable[[tuple[int, ...], int], torch.Tensor]
    num_layers: int
    max_model_len: int


def usual_settings(form: str, num_tokens: int, vocab_size: int, hidden_size: int, max_model_len: int) -> dict[str, Any]:
    """Return a config.json of a small head."""
    if form == "medusa":
        return {"medusa_num_heads": num_tokens, "medusa_num_layers": 1}
    own: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if form == "eagle" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    if form == "dflash":
        own = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "block_size": 1 + num_tokens,
            "dflash_config": {"mask_token_id": vocab_size - 1, "target_layer_ids": [0, NUM_LAYERS - 2]},
            "sliding_window": 3,  # read where there are layers that have one
            "max_window_layers": 1,
        }
    return own | {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2 * max_model_len,
    }


def write_head(folder: Path, form: str, settings: Settings, target: TargetModel) -> None:
    """Write a head with dummy weights of the shapes that its settings ask for."""
    generator, weights = torch.Generator().manual_seed(5), dict[str, torch.Tensor]()
    for name, shape in _shapes(form, settings, target).items():
        if name == "d2t":
            weights[name] = torch.arange(shape[0]) % 2  # token i stands for i or i + 1
        elif name == "t2d":
            weights[name] = torch.zeros(shape[0], dtype=torch.bool)
        elif len(shape) == 1:
            weights[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            weights[name] = torch.randn(shape, generator=generator) * 2 * shape[1] ** -0.5
    (folder / "config.json").write_text(json.dumps(dict(settings)), encoding="utf-8")
    save_file(weights, folder / ("medusa_lm_head.safetensors" if form == "medusa" else "model.safetensors"))


def _shapes(form: str, settings: Settings, target: TargetModel) -> dict[str, tuple[int, ...]]:
    """Return the authors' names of the weights with their shapes."""
    vocab, size = target.table.shape
    if form == "medusa":
        heads, layers = settings["medusa_num_heads"], settings["medusa_num_layers"]
        found: dict[str, tuple[int, ...]] = {}
        for head in range(heads):
            for layer in range(layers):
                found[f"{head}.{layer}.linear.weight"] = (size, size)
                if settings.get("medusa_fc_bias", True):
                    found[f"{head}.{layer}.linear.bias"] = (size,)
            if not settings.get("original_lm_head"):
                found[f"{head}.{layers}.weight"] = (vocab, size)
        return found
    head = settings.get("head_dim") or size // settings["num_attention_heads"]
    queries = settings["num_attention_heads"] * head
    keys = (settings.get("num_key_value_heads") or settings["num_attention_heads"]) * head
    inner, eagle3, dflash = settings["intermediate_size"], form == "eagle3", form == "dflash"
    found = {"fc.weight": (size, (2 if form == "eagle" else len(layer_ids(settings, target))) * size)}
    if form == "eagle" and settings.get("bias", True):
        found["fc.bias"] = (size,)
    if dflash:
        found |= {"hidden_norm.weight": (size,), "norm.weight": (size,)}
    for layer in range(1 if eagle3 else settings["num_hidden_layers"]):
        name = "midlayer" if eagle3 else f"layers.{layer}"
        if eagle3 or dflash or layer:
            found[f"{name}.input_layernorm.weight"] = (size,)
        if dflash:
            found |= {f"{name}.self_attn.{part}.weight": (head,) for part in ("q_norm", "k_norm")}
        if eagle3:
            found[f"{name}.hidden_norm.weight"] = (size,)
        found[f"{name}.post_attention_layernorm.weight"] = (size,)
        wide = 2 * size if eagle3 else size
        parts = {"q_proj": (queries, wide), "k_proj": (keys, wide), "v_proj": (keys, wide), "o_proj": (size, queries)}
        for part, shape in parts.items():
            found[f"{name}.self_attn.{part}.weight"] = shape
            if settings.get("attention_bias"):
                found[f"{name}.self_attn.{part}.bias"] = shape[:1]
        for part, shape in {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}.items():
            found[f"{name}.mlp.{part}.weight"] = shape
            if settings.get("mlp_bias"):
                found[f"{name}.mlp.{part}.bias"] = shape[:1]
    if eagle3:
        drafts = settings.get("draft_vocab_size") or vocab
        found |= {"norm.weight": (size,), "lm_head.weight": (drafts, size)}
        if drafts != vocab:
            found |= {"d2t": (drafts,), "t2d": (vocab,)}
    return found


def layer_ids(settings: Settings, target: TargetModel) -> tuple[int, ...]:
    """Return the target's layers whose inputs an EAGLE-3 or DFlash head reads, which names those before them."""
    if own := settings.get("dflash_config"):
        return tuple(1 + layer for layer in own["target_layer_ids"])
    more = settings.get("eagle_config") or {}
    ids = more.get("eagle_aux_hidden_state_layer_ids") or settings.get("eagle_aux_hidden_state_layer_ids")
    return tuple(ids or (2, target.num_layers // 2, target.num_layers - 3))


def drafts(folder: Path, form: str, target: TargetModel, tokens: Sequence[int], count: int) -> tuple[list[int], float]:
    """Return the chain that a head drafts greedily after a history, and the least distance of a token to the next best.

    Args:
        folder: its config.json and weights.
        form: one of `FORMS`.
        target: what it shares with its model.
        tokens: all accepted tokens.
        count: number of draft tokens.
    """
    settings, weights = read_head(folder)
    history = tuple(tokens)
    if form == "medusa":
        return medusa_chain(settings, weights, target.table, target.state(history, -1), count)
    ids = (-1,) if form == "eagle" else layer_ids(settings, target)
    hidden = [torch.cat([target.state(history[:end], layer) for layer in ids]) for end in range(1, len(history))]
    if form == "dflash":
        return dflash_block(settings, weights, target.table, hidden, history[-1], count)
    return eagle_chain(form, settings, weights, target.table, hidden, history[1:], count)


def read_head(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the settings and the weights of a folder that `write_head` wrote, the weights in float64."""
    file = next(folder.glob("*.safetensors"))
    weights = {name: x.double() if x.is_floating_point() else x for name, x in load_file(file).items()}
    return json.loads((folder / "config.json").read_text(encoding="utf-8")), weights


def _chosen(logits: torch.Tensor) -> tuple[int, float]:
    best = logits.topk(2).values
    return int(logits.argmax()), float(best[0] - best[1])


def medusa_chain(
    settings: Settings, weights: Tensors, table: torch.Tensor, state: torch.Tensor, count: int
) -> tuple[list[int], float]:
    """Return what `drafts` does for Medusa's heads.

    Args:
        settings, weights: the head.
        table: the model's output projection, [vocab_size, hidden_size].
        state: the hidden state that the newest token came from, [hidden_size].
        count: number of draft tokens.
    """
    found, least = list[int](), float("inf")
    for head in range(count):
        x = state.double()
        for layer in range(settings["medusa_num_layers"]):
            name = f"{head}.{layer}.linear"
            x = x + functional.silu(functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")))
        projection = table.double()
        if not settings.get("original_lm_head"):
            projection = weights[f"{head}.{settings['medusa_num_layers']}.weight"]
        token, distance = _chosen(projection @ x)
        found.append(token)
        least = min(least, distance)
    return found, least


def dflash_block(
    settings: Settings,
    weights: Tensors,
    table: torch.Tensor,
    states: Sequence[torch.Tensor],
    newest: int,
    count: int,
) -> tuple[list[int], float]:
    """Return what `drafts` does for DFlash: the likeliest token at each mask of a block behind the newest token.

    Args:
        settings, weights: the head.
        table: the model's embedding and output projection, [vocab_size, hidden_size].
        states: hidden states of all tokens but the newest, those of several layers side by side.
        newest: the newest token.
        count: number of draft tokens.
    """

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], settings.get("rms_norm_eps", 1e-6))

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    known = norm("hidden_norm", linear("fc", torch.stack(tuple(states)).double()))
    x = table.double()[[newest, *[settings["dflash_config"]["mask_token_id"]] * count]]
    heads, length = settings["num_attention_heads"], len(known) + len(x)
    cosines, sines = _turns(settings, length)
    own, key_at = torch.arange(len(known), length)[:, None], torch.arange(length)[None]
    for layer, window in enumerate(_windows(settings)):
        name = f"layers.{layer}"
        y = norm(f"{name}.input_layernorm", x)
        both = torch.cat([known, y])
        query, key, value = (
            linear(f"{name}.self_attn.{part}_proj", z) for part, z in (("q", y), ("k", both), ("v", both))
        )
        size = query.shape[-1] // heads
        query, key, value = (z.view(len(z), -1, size) for z in (query, key, value))
        query = _turned(norm(f"{name}.self_attn.q_norm", query), cosines[len(known) :], sines[len(known) :])
        key = _turned(norm(f"{name}.self_attn.k_norm", key), cosines, sines)
        key, value = (z.repeat_interleave(heads // z.shape[1], 1) for z in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * size**-0.5
        if window is not None:  # the block sees itself whole
            scores = scores.masked_fill(key_at <= own - window, -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        x = x + linear(f"{name}.self_attn.o_proj", out)
        y = norm(f"{name}.post_attention_layernorm", x)
        act = ACTIVATIONS[settings.get("hidden_act", "silu")]
        x = x + linear(
            f"{name}.mlp.down_proj", act(linear(f"{name}.mlp.gate_proj", y)) * linear(f"{name}.mlp.up_proj", y)
        )
    found = [_chosen(logits) for logits in norm("norm", x)[1:] @ table.double().T]
    return [token for token, _ in found], min(distance for _, distance in found)


def _windows(settings: Settings) -> list[int | None]:
    """Return the window of each layer of a DFlash head, as in transformers' ``Qwen3Config``."""
    layers, window = settings["num_hidden_layers"], settings.get("sliding_window")
    kinds = settings.get("layer_types")
    if kinds is None:
        first = settings.get("max_window_layers", 28) if settings.get("use_sliding_window") else layers
        kinds = ["full_attention"] * min(first, layers) + ["sliding_attention"] * max(0, layers - first)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn heads [n, heads, size] by cosines and sines [n, size]."""
    first, second = x.chunk(2, -1)
    return x * cosines[:, None] + torch.cat([-second, first], -1) * sines[:, None]


def eagle_chain(
    form: str,
    settings: Settings,
    weights: Tensors,
    table: torch.Tensor,
    states: Sequence[torch.Tensor],
    following: Sequence[int],
    count: int,
) -> tuple[list[int], float]:
    """Return what `drafts` does for EAGLE and EAGLE-3.

    Args:
        form: one of both.
        settings, weights: the head.
        table: the model's embedding and output projection, [vocab_size, hidden_size].
        states: hidden states of all tokens but the newest, those of several layers side by side.
        following: the token after each of them.
        count: number of draft tokens.
    """
    eagle3, table = form == "eagle3", table.double()
    hidden = [functional.linear(x.double(), weights["fc.weight"]) if eagle3 else x.double() for x in states]
    tokens, found, least = list(following), list[int](), float("inf")
    for _ in range(count):
        out, after = _network(eagle3, settings, weights, table[tokens], torch.stack(hidden))
        token, distance = _chosen((weights["lm_head.weight"] if eagle3 else table) @ out[-1])
        if "d2t" in weights:
            token += int(weights["d2t"][token])
        found.append(token)
        tokens.append(token)
        hidden.append(after[-1])
        least = min(least, distance)
    return found, least


def _network(
    eagle3: bool, settings: Settings, weights: Tensors, embeds: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the output projection reads and what the next step takes as hidden states, [n, hidden_size] each."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], settings.get("rms_norm_eps", 1e-6))

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def mlp(name: str, x: torch.Tensor) -> torch.Tensor:
        act = ACTIVATIONS[settings.get("hidden_act", "silu")]
        return linear(f"{name}.down_proj", act(linear(f"{name}.gate_proj", x)) * linear(f"{name}.up_proj", x))

    def attended(name: str, x: torch.Tensor) -> torch.Tensor:
        return _attention(settings, x, lambda part, y: linear(f"{name}.{part}", y))

    if eagle3:
        normed = norm("midlayer.hidden_norm", hidden)
        both = torch.cat([norm("midlayer.input_layernorm", embeds), normed], -1)
        x = (normed if settings.get("norm_before_residual") else hidden) + attended("midlayer.self_attn", both)
        x = x + mlp("midlayer.mlp", norm("midlayer.post_attention_layernorm", x))
        return norm("norm", x), x
    x = linear("fc", torch.cat([embeds, hidden], -1))
    for layer in range(settings["num_hidden_layers"]):
        name = f"layers.{layer}"
        x = x + attended(f"{name}.self_attn", norm(f"{name}.input_layernorm", x) if layer else x)
        x = x + mlp(f"{name}.mlp", norm(f"{name}.post_attention_layernorm", x))
    return x, x


def _attention(
    settings: Settings, x: torch.Tensor, linear: Callable[[str, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return causal attention of positions 0 to n - 1 with rotary embeddings, [n, hidden_size]."""
    heads = settings["num_attention_heads"]
    groups = heads // (settings.get("num_key_value_heads") or heads)
    query, key, value = (linear(part, x) for part in ("q_proj", "k_proj", "v_proj"))
    size = query.shape[-1] // heads
    query, key, value = (y.view(len(x), -1, size).transpose(0, 1) for y in (query, key, value))  # [heads, n, size]
    cosines, sines = _turns(settings, len(x))

    def turned(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        return y * cosines + torch.cat([-second, first], -1) * sines

    keys, values = turned(key).repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = turned(query) @ keys.transpose(1, 2) * size**-0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    return linear("o_proj", out.transpose(0, 1).flatten(1))


def _turns(settings: Settings, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [length, head_size] of the positions from 0."""
    names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta", "rope_scaling")
    own = {key: settings[key] for key in (*names, "rope_parameters") if key in settings}
    cosines, sines = _all_turns(json.dumps(own), -(-length // 128) * 128)
    return cosines[:length], sines[:length]


@lru_cache(maxsize=32)
def _all_turns(settings: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(LlamaConfig(**json.loads(settings)))
    cosines, sines = rotary(torch.zeros(1, dtype=torch.float64), torch.arange(length)[None])
    return cosines[0], sines[0]
