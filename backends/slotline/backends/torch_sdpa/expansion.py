"""Attention over latents whose projection to keys and values the backend applies itself.

With the expansion ``k = W_k c`` and ``v = W_v c``, attention of all heads over keys and values is the same as attention
over the latents c with queries ``q W_k`` and outputs that are multiplied by ``W_v`` (DeepSeek-V2, arXiv 2405.04434,
section 2.1.2). The first form reads `num_heads` small keys and values, which it has to compute from each latent. The
second one multiplies queries by whole latents. Long queries share the expanded keys, so it pays for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve

from slotline.registry.contracts.attention import AttentionLayer

MOST_ABSORBED = 16
"""Query tokens of a request up to which queries are multiplied instead of keys."""


def attend_expanded(
    expansion: torch.Tensor,
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    layer: AttentionLayer,
    query: torch.Tensor,
    latents: torch.Tensor,
    _values: torch.Tensor,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of plain queries over latents, in float32.

    Args:
        expansion: [H, plain + Dv, rank].
        attend: computes attention over keys and values, with `others` after them.
        query: [B, q, H, plain + rotary].
        latents: [B, L, 1, rank + rotary].

    Returns:
        the output [B, q, H, Dv], and the log-sum-exp [H, B, q].
    """
    rank = layer.head_size_v
    plain = query.shape[-1] - (layer.head_size - rank)
    to_keys, to_values = expansion[:, :plain].float(), expansion[:, plain:].float()
    query, latents = query.float(), latents.float()
    if query.shape[1] > MOST_ABSORBED:
        latent, rotated = latents[:, :, 0, :rank], latents[..., rank:].expand(-1, -1, layer.num_heads, -1)
        keys = torch.cat((torch.einsum("blr,hpr->blhp", latent, to_keys), rotated), dim=-1)
        values = torch.einsum("blr,hvr->blhv", latent, to_values)
        return attend(evolve(layer, num_kv_heads=layer.num_heads), query, keys, values, *others)
    moved = torch.einsum("bqhp,hpr->bqhr", query[..., :plain], to_keys)
    absorbed = torch.cat((moved, query[..., plain:]), dim=-1)
    out, lse = attend(layer, absorbed, latents, latents[..., :rank], *others)
    return torch.einsum("bqhr,hvr->bqhv", out, to_values), lse
