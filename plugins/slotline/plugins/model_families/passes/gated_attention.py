"""Attention modules whose output has a gate, which backends may take over (Qwen3-Next, Qwen3.5).

The query projection gives a query and a gate of the same size for each head. transformers norms, rotates and gates in
some thirty small operations. In steps in which the layer's backend takes over the rotation, it gets the projection's
own numbers. In all others the module's own forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from attrs import astuple
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slotline.kernels.attention_edges import finished, turned
from slotline.plugins.model_families.binding import slot_attention
from slotline.plugins.model_families.passes.attention_probe import Recorder, probe, recording, same
from slotline.plugins.model_families.passes.head_edges import head_edges, norms_of, projected, room_for_scales
from slotline.plugins.model_families.passes.lean_attention import Heads, has_cache
from slotline.plugins.model_families.passes.merged_projections import QUERY_KEY_VALUE, merged_of
from slotline.plugins.model_families.passes.packed_linear import has_hooks
from slotline.plugins.model_families.passes.target import Target
from slotline.registry.contracts.attention_edges import EDGES, AttentionEdges


class GatedParts(NamedTuple):
    """Parts of a merged projection: query and gate [n, H, size], key and value [n, Hkv, size]."""

    query: torch.Tensor
    gate: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class GatedForward:
    """Forward of one attention module that leaves the edges of attention to the layer's backend where it can."""

    def __init__(self, module: nn.Module, heads: Heads) -> None:
        self._module: Any = module
        self._heads = heads
        self._original: Callable[..., Any] = module.forward

    @property
    def facts(self) -> dict[str, Any]:
        """What describes this forward without a tensor."""
        return {"heads": astuple(self._heads)}

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Compute the original's result from hidden_states [1, num_tokens, hidden_size], cosines and sines."""
        if attention_mask is None and not has_cache(options) and all(arg is None for arg in args):
            found = self._by_backend(hidden_states, position_embeddings)
            if found is not None:
                return projected(self._module, *found), None
        return self._original(hidden_states, position_embeddings, attention_mask, *args, **options)

    def parts(self, merged: torch.Tensor) -> GatedParts:
        """View a merged projection [1, n, all heads * size] as its parts."""
        heads, rows = self._heads, merged[0].unflatten(-1, (-1, self._heads.size))  # [n, all heads, size]
        both = rows[:, : 2 * heads.query].unflatten(1, (-1, 2))
        key, value = rows[:, 2 * heads.query :].split(heads.key, 1)
        return GatedParts(both[:, :, 0], both[:, :, 1], key, value)

    def edges(
        self, taken: Any, embeddings: Any, gate: torch.Tensor, scales: torch.Tensor | None = None
    ) -> AttentionEdges | None:
        """Return what the layer's backend computes, None if it has to take more than `taken`."""
        heads = self._heads
        return head_edges(taken, norms_of(self._module), embeddings, heads.size, heads.rotary_size, gate, scales)

    def _by_backend(
        self, hidden_states: torch.Tensor, embeddings: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the input of the output projection [1, n, H * size], with scales if it is rounded.

        None if the original must be called.
        """
        module = self._module
        if ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation) is not slot_attention:
            return None
        slot, merged = module.slotline_slot, merged_of(module, "qkv_proj", QUERY_KEY_VALUE)
        taken = slot.edges()
        if not taken or merged is None or not slot.is_plain() or not isinstance(embeddings, tuple):
            return None
        parts = self.parts(merged(hidden_states))
        edges = self.edges(taken, embeddings, parts.gate, room_for_scales(module, hidden_states))
        if edges is None:
            return None
        out: torch.Tensor = slot.attend(parts.query, parts.key, parts.value, None, written=True, edges=edges)
        if edges.gate is None:
            out = out * torch.sigmoid(parts.gate)
        return out.flatten(1)[None], edges.scales


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Let every attention module with a gate leave its edges to backends, if that is the same as its own forward."""
    rotary = getattr(getattr(model, "base_model", None), "rotary_emb", None)
    if target.kernels is None or rotary is None:
        return ()
    count = 0
    with recording(model) as recorder:
        for module in list(model.modules()):
            if not _has_gate(module):
                continue
            facts: Mapping[str, Any] | None = target.decisions.decide(partial(_facts, module, rotary, recorder, target))
            if facts is not None:
                module.forward = GatedForward(module, Heads(*facts["heads"]))
                count += 1
    return (
        (f"norms, rotation and gates are left to backends that take them in {count} attention modules",)
        if count
        else ()
    )


def _has_gate(module: Any) -> bool:
    """Return True for modules with a query projection of twice the size that the output projection takes."""
    merged = merged_of(module, "qkv_proj", QUERY_KEY_VALUE)
    if (
        merged is None
        or has_hooks(module)
        or not all(hasattr(module, name) for name in ("o_proj", "head_dim", "config"))
    ):
        return False
    query = getattr(module, "q_proj", None)
    sizes = getattr(query, "out_features", 0), getattr(module.o_proj, "in_features", -1)
    return sizes[0] == 2 * sizes[1]


def _facts(module: Any, rotary: Any, recorder: Recorder, target: Target) -> dict[str, Any] | None:
    """Return the facts of the forward that gives the module's own output, or None."""
    hidden, embeddings = probe(module, rotary, target)
    expected, _ = module.forward(hidden, position_embeddings=embeddings, attention_mask=None)
    query, key, value, options = recorder.calls.pop()
    merged = merged_of(module, "qkv_proj", QUERY_KEY_VALUE)
    if merged is None or not isinstance(embeddings, tuple) or options.get("s_aux") is not None:
        return None
    for rotary_size in (embeddings[0].shape[-1], 2 * embeddings[0].shape[-1]):
        if rotary_size > module.head_dim:
            continue
        gated = GatedForward(module, Heads(query.shape[1], key.shape[1], module.head_dim, rotary_size))
        parts = gated.parts(merged(hidden))
        edges = gated.edges(EDGES, embeddings, parts.gate)
        if edges is None:
            return None
        own = turned(parts.query, parts.key, edges)
        mixed = torch.empty_like(own[0])
        finished(own[0], edges, mixed)  # the recorder gives queries as the output of attention
        shown = [part.transpose(0, 1)[None] for part in (*own, parts.value)]
        recorder.calls.append((shown[0], shown[1], shown[2], {}))
        if same((module.o_proj(mixed.flatten(1)[None]),), expected, (query, key, value), recorder):
            return gated.facts
    return None
