"""Connection of a transformers decoder layer's attention to the drafter's `attend`, latent attention included.

transformers calls the function named `ATTENTION_NAME` with the attention module. The function finds the current call's
`attend` on the module. No mask is built, because the cache knows the keys that a token may see.

Multi-head latent attention keeps one latent c a token instead of keys and values (DeepSeek-V2, arXiv 2405.04434,
section 2.1). The keys are ``W_k c`` and the values ``W_v c``, so the layer can attend over the latents themselves: with
``q W_k`` for a query, and ``W_v`` after the weighted sum. transformers expands latents in `expand_kv`, which
`keep_latents` replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from slotline.registry.errors import ModelError

ATTENTION_NAME = "slotline_mtp"
"""The attention implementation's name in transformers' configurations."""
ATTRIBUTE = "slotline_mtp_attend"
"""The attribute of an attention module that holds what attends for it."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query [n, num_heads, head_size], key and value [n, num_kv_heads, ...]) to [n, num_heads, head_size_v]."""


def register() -> None:
    """Register the function with transformers. Repeated calls have no effect."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def keep_latents(module: Any) -> None:
    """Let an attention module call attention with latents as its keys.

    Raises:
        ModelError: if it does not expand latents by one plain projection.
    """
    if not hasattr(module, "expand_kv") or not isinstance(getattr(module, "kv_b_proj", None), torch.nn.Linear):
        raise ModelError(
            f"the latent attention of {type(module).__name__} is expanded in a way that this drafter does not know",
            fix="install a newer transformers, or name another drafter",
        )
    module.expand_kv = _latents


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Map query [1, num_heads, n, head_size], key and value [1, num_kv_heads, n, ..] to [1, n, num_heads, size]."""
    attend: Attend = getattr(module, ATTRIBUTE)
    query, key, value = (states.transpose(1, 2)[0] for states in (query, key, value))
    if module.__dict__.get("expand_kv") is not _latents:
        return attend(query, key, value)[None], None
    plain, rank = module.qk_nope_head_dim, module.kv_lora_rank
    expansion = module.kv_b_proj.weight.view(-1, plain + module.v_head_dim, rank)  # [num_heads, both, rank]
    of_keys, of_values = expansion[:, :plain], expansion[:, plain:]
    moved = torch.einsum("nhp,hpr->nhr", query[..., :plain], of_keys)
    out = attend(torch.cat([moved, query[..., plain:]], -1), key, value)  # [n, num_heads, rank]
    return torch.einsum("nhr,hvr->nhv", out, of_values)[None], None


def _latents(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [1, 1, n, rank + rotary size] of latents and rotated keys. Values are their first numbers."""
    key = torch.cat([latent, rotated], -1)
    return key, key[..., : latent.shape[-1]]
