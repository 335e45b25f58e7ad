"""Edges of attention in modules of transformers: what a module can leave to a backend."""

from __future__ import annotations

from typing import Any

import torch

from slotline.plugins.model_families import latents
from slotline.registry.contracts.attention_edges import EXPANSION, GATE, NORM, ROTARY, ROUNDED

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def edges_of(module: Any, query: torch.Tensor, value: torch.Tensor, *, mla: bool) -> tuple[str, ...]:
    """Return the names of the edges that an attention module can leave to a backend.

    Args:
        query, value: [1, heads, num_tokens, size] of its call of attention.
        mla: whether it hands on latents.
    """
    if mla:
        return (EXPANSION,) if latents.hands_on(module) else ()
    children, size = module._modules, getattr(module, "head_dim", None)
    if any(children.get(name) is None for name in PROJECTIONS) or size != query.shape[3] or size != value.shape[3]:
        return ()
    if not getattr(module, "use_rope", True):
        return ()
    gated = getattr(children["q_proj"], "out_features", 0) == 2 * query.shape[1] * size
    norms = [children.get(name) for name in ("q_norm", "k_norm")]
    normed = all(norm is not None and _width(norm) == size for norm in norms)
    if not normed and any(norm is not None for norm in norms):
        return ()  # over all heads: the rotation comes after it
    return (*((NORM,) if normed else ()), ROTARY, *((GATE,) if gated else ()), ROUNDED)


def _width(norm: Any) -> int | None:
    weight = norm._parameters.get("weight")
    return None if weight is None else weight.numel()
