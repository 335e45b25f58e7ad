"""Edges of attention in torch, as `slotline.registry.contracts.attention_edges` defines them."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.attention_edges import AttentionEdges, HeadNorm

MOST = 127
"""Largest number of a rounded output."""


def new_output(
    layer: AttentionLayer, query: torch.Tensor, edges: AttentionEdges | None = None, **_others: Any
) -> torch.Tensor:
    """Return an output of attention [num_tokens, num_heads, value size] that nothing is written to.

    Args:
        query: [num_tokens, num_heads, ...].
        edges: of the call. They decide about the dtype and the value size.
    """
    if edges is None:
        return query.new_empty((query.shape[0], layer.num_heads, layer.head_size_v))
    size = layer.head_size_v if edges.expansion is None else expanded_size(layer, query, edges.expansion)
    dtype = query.dtype if edges.scales is None else torch.int8
    return query.new_empty((query.shape[0], layer.num_heads, size), dtype=dtype)


def expanded_size(layer: AttentionLayer, query: torch.Tensor, expansion: torch.Tensor) -> int:
    """Return the size of a value that is expanded from a latent."""
    plain = query.shape[-1] - (layer.head_size - layer.head_size_v)  # a query has the rotary part beside it
    return expansion.shape[1] - plain


def turned(query: torch.Tensor, key: torch.Tensor, edges: AttentionEdges) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key [num_tokens, heads, head_size], normed and rotated, rounded once to their dtype."""
    return _turned(query, edges.query_norm, edges), _turned(key, edges.key_norm, edges)


def finished(out: torch.Tensor, edges: AttentionEdges, into: torch.Tensor) -> None:
    """Gate and round an output [num_tokens, num_heads, value size], into `into` of the same shape."""
    if edges.gate is not None:
        gated = out.float() * torch.sigmoid(edges.gate[: len(out)].float())
        out = torch.where(out == 0, 0, gated)  # padding has no gate
    if edges.scales is None:
        into.copy_(out)
        return
    groups = out.float().reshape(len(out), edges.scales.shape[1], -1)
    scales = groups.abs().amax(2) / MOST  # [num_tokens, n]
    edges.scales.copy_(scales)
    into.copy_((groups / scales.clamp_min(torch.finfo(scales.dtype).tiny)[..., None]).round_().view(into.shape))


def _turned(states: torch.Tensor, norm: HeadNorm | None, edges: AttentionEdges) -> torch.Tensor:
    found = states.float()
    if norm is not None:
        mean = found.square().mean(-1, keepdim=True)
        found = found * torch.rsqrt(mean + norm.eps) * (norm.offset + norm.weight.float())
    if edges.cos is not None and edges.sin is not None:
        found = _rotated(found, edges.cos.float(), edges.sin.float(), edges.rotary_size)
    return found.to(states.dtype)


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, size: int) -> torch.Tensor:
    """Rotate states [num_tokens, heads, head_size] by cosines and sines [num_tokens, size or half of it]."""
    half, rows = size // 2, len(states)
    (cos_a, cos_b), (sin_a, sin_b) = ((part[:rows, None, :half], part[:rows, None, -half:]) for part in (cos, sin))
    a, b = states[..., :half], states[..., half:size]
    return torch.cat((a * cos_a - b * sin_a, b * cos_b + a * sin_b, states[..., size:]), dim=-1)
