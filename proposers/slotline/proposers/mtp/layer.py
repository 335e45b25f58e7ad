"""The multi-token-prediction layer as a network (DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 2.2).

At position i it reads the model's hidden state there, after the last norm, and the embedding of the next token. Each
has its own norm. A projection joins them, followed by one decoder layer of the model's own kind, and a norm. The result
is the input of the model's output projection, and the hidden state for the next step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from slotline.proposers.eagle.heads import fill
from slotline.proposers.mtp import attention
from slotline.proposers.mtp.layouts import Found, Layout
from slotline.registry.contracts import AttentionLayer, ModelFacts
from slotline.registry.errors import ModelError

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def model_layer(facts: ModelFacts) -> AttentionLayer:
    """Return the model's attention layer that the multi-token-prediction layer resembles: the last full one.

    Raises:
        ModelError: if the model has no attention.
    """
    if not facts.layers:
        raise ModelError(
            f"{facts.architecture} in {str(facts.path)!r} has no attention layer, as an MTP layer would have",
            fix="name another drafter",
        )
    full = [layer for layer in facts.layers if layer.window is None and layer.chunk is None]
    return (full or list(facts.layers))[-1]


class MtpLayer(nn.Module):
    """The layer, with the weights of a checkpoint, in host memory.

    Raises:
        ModelError: if transformers does not have the model's class, or if weights are missing or have another shape.
    """

    def __init__(self, facts: ModelFacts, found: Found, dtype: torch.dtype) -> None:
        super().__init__()
        model, like = _without_memory(facts), model_layer(facts)
        base, name = model.base_model, like.name
        self.layer = model.get_submodule(name.rpartition(".")[0])
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(base.norm) for _ in range(3))
        size = facts.hidden_size
        self.projection = nn.Linear(2 * size, size, bias=False, device="meta")
        self._hidden_first = found.layout.hidden_first
        stored = found.read()
        weights, used = _named(stored, found.layout, self.layer.state_dict())
        fill(self, weights, found.path, assign=True)
        _refuse_strange(found, stored, used)
        kept = tuple(model._keep_in_fp32_modules_strict or ()) + tuple(model._keep_in_fp32_modules or ())
        _cast(self, dtype, kept)
        self.eval().requires_grad_(False)
        # Not children: the rotary's buffers are no weights and stay in float32, the other one is the layer's.
        self.__dict__["rotary"] = type(base.rotary_emb)(model.config)
        self.__dict__["attention"] = self.layer.get_submodule(name.rpartition(".")[2])
        if like.mla:
            attention.keep_latents(self.__dict__["attention"])

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the model's last hidden states [n, hidden_size] in the form that `forward` takes."""
        return hidden

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step.

        Args:
            embeddings: [n, hidden_size] of the tokens after the positions.
            hidden: [n, hidden_size] at the positions, from the model or from this method.
            positions: [n] int64.
            attend: maps (0, query, key, value) to the attention's output (see `slotline.proposers.eagle.heads`).

        Returns:
            The input of the output projection, and the `hidden` of the next step: the same [n, hidden_size].
        """
        both = [self.enorm(embeddings), self.hnorm(hidden)]
        x = self.projection(torch.cat(both[::-1] if self._hidden_first else both, -1))[None]
        rotary = self.__dict__["rotary"]
        if next(rotary.buffers()).device != positions.device:
            rotary.to(positions.device)
        setattr(self.__dict__["attention"], attention.ATTRIBUTE, partial(attend, 0))
        x = self.layer(x, attention_mask=None, position_embeddings=rotary(x, positions[None]))
        x = self.norm(x)[0]
        return x, x


def _without_memory(facts: ModelFacts) -> Any:
    """Return the model on the meta device. Only its decoder layer and its norm are used."""
    model_class = getattr(transformers, facts.architecture, None)
    if model_class is None:
        raise ModelError(
            f"transformers {transformers.__version__} has no class {facts.architecture!r} to build an MTP layer of",
            fix="install a newer transformers, or name another drafter",
        )
    attention.register()
    config = model_class.config_class.from_pretrained(facts.path, local_files_only=True, trust_remote_code=False)
    config._attn_implementation = attention.ATTENTION_NAME
    with torch.device("meta"):
        model = model_class(config)
    if missing := [name for name in ("norm", "rotary_emb") if not hasattr(model.base_model, name)]:
        raise ModelError(
            f"{facts.architecture} has no {' and no '.join(missing)} around its layers, which an MTP layer is built of",
            fix="name another drafter",
        )
    return model


def _named(
    weights: Mapping[str, torch.Tensor], layout: Layout, layer: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the checkpoint's tensors under the names of `MtpLayer`, separate experts stacked, and the names used."""
    around = {
        "enorm": layout.embedding_norm,
        "hnorm": layout.hidden_norm,
        "norm": layout.norm,
        "projection": layout.projection,
    }
    named = {
        f"{own}.weight": weights[f"{theirs}.weight"] for own, theirs in around.items() if f"{theirs}.weight" in weights
    }
    used = {f"{theirs}.weight" for theirs in around.values()}
    for own in layer:
        name = f"{layout.layer}{own}"
        if name in weights:
            used.add(name)
            named[f"layer.{own}"] = weights[name]
        elif experts := _experts(weights, name):
            used.update(part for parts in experts for part in parts)
            named[f"layer.{own}"] = torch.stack([torch.cat([weights[part] for part in parts]) for parts in experts])
    return named, used


def _refuse_strange(found: Found, weights: Mapping[str, torch.Tensor], used: set[str]) -> None:
    """Raise ModelError for a tensor that has no place in the layer."""
    if strange := sorted(name for name in weights if name not in used and not name.endswith(_COMPUTED)):
        raise ModelError(
            f"{str(found.path)!r} has {strange[0]} {list(weights[strange[0]].shape)}, for which the model's own layer "
            "has no place: its multi-token-prediction layer is another one",
            fix="name another drafter",
        )


_COMPUTED = "rotary_emb.inv_freq"
"""Stored by older versions of transformers, and computed by all."""


def _experts(weights: Mapping[str, torch.Tensor], name: str) -> list[list[str]]:
    """Return the names of the tensors of each expert that a stack [experts, out, in] is made of, [] for no experts.

    `...experts.gate_up_proj` is made of `...experts.0.gate_proj.weight`, `...experts.0.up_proj.weight` and so on.
    """
    prefix, _, last = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    found = list[list[str]]()
    while weights.keys() >= {*(names := [f"{prefix}.{len(found)}.{part}.weight" for part in parts])}:
        found.append(names)
    return found


def _cast(module: nn.Module, dtype: torch.dtype, kept: tuple[str, ...]) -> None:
    """Convert all floating tensors to `dtype`, except those with one of the names `kept` in their path."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        wanted = torch.float32 if any(part in name.split(".") for part in kept) else dtype
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(wanted)
