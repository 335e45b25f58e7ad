"""Multi-head latent attention of transformers' modules, absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1).

transformers' modules end their own projections with `expand_kv`, which makes keys and values of all heads from latents.
It is replaced by a function that passes the latents on, so everything before and after it stays transformers' own. The
expansion's weights are multiplied into queries and outputs instead of keys and values: with the expansion ``k = W_k
c``, ``q k = (q W_k) c``, and the weighted sum of ``W_v c`` is ``W_v`` times that of the latents c.
"""

from __future__ import annotations

from typing import Any

import torch

EXPANSION = "expand_kv"
"""The method of transformers' modules: latents [1, 1, num_tokens, rank] and rotated keys to keys and values."""


def is_latent(module: Any) -> bool:
    """Return True if an attention module keeps latents that one plain projection expands."""
    return hasattr(module, EXPANSION) and type(getattr(module, "kv_b_proj", None)) is torch.nn.Linear


def hands_on(module: Any) -> bool:
    """Return True if `hand_on` was called for it."""
    return getattr(module, EXPANSION, None) is latents


class Expansion(torch.nn.Linear):
    """Projection whose weight is read without calling it. Its own class keeps passes from changing it."""


def hand_on(module: Any) -> None:
    """Let a module's own forward call attention with latents as its keys."""
    setattr(module, EXPANSION, latents)
    module.kv_b_proj.__class__ = Expansion


def latents(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [1, 1, num_tokens, rank + rotary size], and values that are their first `rank` numbers."""
    key = torch.cat((latent, rotated), dim=-1)
    return key, key[..., : latent.shape[-1]]


def absorbed(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Return queries for latents, [num_tokens, num_heads, rank + rotary size], from those for keys.

    Args:
        module: the attention module.
        query: [num_tokens, num_heads, size without positions + rotary size].
    """
    plain = module.qk_nope_head_dim
    weight = expansion_of(module)[:, :plain]  # [num_heads, plain, rank]
    moved = torch.bmm(query[..., :plain].transpose(0, 1), weight).transpose(0, 1)
    return torch.cat((moved, query[..., plain:]), dim=-1)


def expanded(module: Any, out: torch.Tensor) -> torch.Tensor:
    """Return outputs [num_tokens, num_heads, v_head_dim] of weighted sums of latents [num_tokens, num_heads, rank]."""
    weight = expansion_of(module)[:, module.qk_nope_head_dim :]  # [num_heads, v_head_dim, rank]
    return torch.bmm(out.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def expansion_of(module: Any) -> torch.Tensor:
    """View the projection's own weight as [num_heads, size without positions + v_head_dim, rank]."""
    weight: torch.Tensor = module.kv_b_proj.weight
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])
