"""Folders of untrained EAGLE and EAGLE-3 heads for a model, and what such a head drafts when nothing is cached."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import known_oracle

from slotline.proposers.eagle.heads import Eagle3Head, EagleHead, fill, read_config, read_weights

AUX = (1, 2, 3)


def build(folder: Path, model: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """A folder as the authors of EAGLE publish them, with random weights."""
    target = json.loads((model / "config.json").read_text())
    target = target.get("text_config", target)
    config = {
        "architectures": ["LlamaForCausalLM" if kind == "eagle" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
    }
    if kind == "eagle3":
        config |= {"draft_vocab_size": 100, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX)}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    read = read_config(folder)
    head: Any = EagleHead(read, bias=True) if kind == "eagle" else Eagle3Head(read, num_states=len(read.layer_ids) or 3)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(x.shape, generator=generator) / 6 for name, x in head.state_dict().items()}
    if kind == "eagle3":
        kept = torch.randperm(config["vocab_size"], generator=generator)[: read.draft_vocab_size].sort().values
        weights["d2t"] = kept - torch.arange(len(kept))
        weights["t2d"] = torch.isin(torch.arange(config["vocab_size"]), kept)
    save_file(weights, folder / "model.safetensors")
    return folder


class Dense:
    """Causal attention over all that it was given, without a cache of blocks."""

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[n, num_heads, head_size]: the queries are the last tokens."""
        self.keys = key if self.keys is None else torch.cat([self.keys, key])
        self.values = value if self.values is None else torch.cat([self.values, value])
        groups, n, total = query.shape[1] // key.shape[1], len(query), len(self.keys)
        k, v = (x.repeat_interleave(groups, 1) for x in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", query, k) * query.shape[-1] ** -0.5
        hidden = torch.arange(total)[None] > torch.arange(total - n, total)[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Expected:
    """What the head in a folder drafts for a model's text, computed without a cache of blocks."""

    def __init__(self, folder: Path, model: Path, kind: str) -> None:
        self.model, self.kind = known_oracle(model), kind
        config, weights = read_config(folder), read_weights(folder)
        self.head: Any = EagleHead(config, bias=True) if kind == "eagle" else Eagle3Head(config)
        fill(self.head, weights, folder)
        self.kept = weights["d2t"] + torch.arange(config.draft_vocab_size) if kind == "eagle3" else None
        self.read: list[tuple[list[int], tuple[torch.Tensor, ...]]] = []
        self.known: dict[tuple[int, ...], list[int]] = {}

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Drafts behind `tokens`, whose last one the model has not computed. They are computed once."""
        found = self.known.setdefault((*tokens,), [])
        if len(found) < count:
            found[:] = self._drafted(tokens, count)
        return found[:count]

    def _drafted(self, tokens: list[int], count: int) -> list[int]:
        embed, attend, last = self.model.get_input_embeddings(), Dense(), len(tokens) - 1
        out, hidden, attend.keys, attend.values = (x[:last] for x in self._of_text(tokens))
        found = [self._best(out)]
        for place in range(last, last - 1 + count):
            out, hidden = self.head(embed(torch.tensor(found[-1:])), hidden[-1:], torch.tensor([place]), attend)
            found.append(self._best(out))
        return found

    def _of_text(self, tokens: list[int]) -> tuple[torch.Tensor, ...]:
        """Outputs, hidden states, keys and values of the head at every place of a text that begins with `tokens`."""
        for text, states in self.read:
            if text[: len(tokens)] == tokens:
                return states
        ids, embed, attend = torch.tensor(tokens), self.model.get_input_embeddings(), Dense()
        states = self.model(ids[None, :-1], output_hidden_states=True).hidden_states
        chosen = states[-1][0] if self.kind == "eagle" else torch.cat([states[layer][0] for layer in AUX], -1)
        out, hidden = self.head(embed(ids[1:]), self.head.enter(chosen), torch.arange(len(ids) - 1), attend)
        self.read.append((tokens, (out, hidden, attend.keys, attend.values)))
        return self.read[-1][1]

    def _best(self, out: torch.Tensor) -> int:
        if self.kept is not None:
            return int(self.kept[self.head.lm_head(out[-1]).argmax()])
        logits, cap = (
            self.model.get_output_embeddings()(out[-1]),
            getattr(self.model.config, "final_logit_softcapping", None),
        )
        return int((logits if cap is None else torch.tanh(logits / cap) * cap).argmax())  # capped ones may be equal


@cache
def expected_of(folder: Path, model: Path, kind: str) -> Expected:
    """Return `Expected(folder, model, kind)`, made once. The folder must not be written again."""
    return Expected(folder, model, kind)
