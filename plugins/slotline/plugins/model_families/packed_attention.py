"""Attention of vision encoders over all their pieces in one call, on a CUDA device.

Encoders of images with any size keep the patches of all images (or windows of them) side by side and say where each
piece begins (`cu_seqlens`). Transformers cuts them apart and attends to each piece alone, unless the attention
implementation is a flash one. This one calls the variable-length kernel that torch ships (FlashAttention-2,
https://arxiv.org/abs/2307.08691), so nothing is to be installed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

NAME = "slotline_flash_packed"
"""The implementation's name in transformers' configurations. It hands the pieces' bounds to a name with "flash"."""

_KINDS = (torch.float16, torch.bfloat16)
_STEP, _LARGEST = 8, 256
"""Heads that the kernel takes: multiples of 8, up to 256."""


def serve(encoder: torch.nn.Module, config: Any, device: torch.device) -> None:
    """Let an encoder attend to all its pieces at once, if the device, the dtype and the size of its heads allow it.

    Args:
        encoder: module whose attention modules read `config`.
        config: of the encoder, from transformers.
        device: where it runs.
    """
    head = getattr(config, "embed_dim", config.hidden_size) // config.num_heads
    fits = head % _STEP == 0 and head <= _LARGEST and next(encoder.parameters()).dtype in _KINDS
    if device.type != "cuda" or not fits or not torch.backends.cuda.is_flash_attention_available():
        return
    AttentionInterface.register(NAME, attend)
    for module in encoder.modules():
        read: Any = getattr(module, "config", None)
        if type(read) is type(config):
            read._attn_implementation = NAME


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within pieces, not causal.

    Args:
        module: the attention module, not read.
        query, key, value: [1, heads, tokens, head size], float16 or bfloat16.
        attention_mask: None, since pieces say all.
        scaling: factor of the scores.
        cu_seq_lens_q: [pieces + 1] int32, where each piece begins, and the end.
        max_length_q: tokens of the longest piece.

    Returns:
        [1, tokens, heads, head size], and no weights.
    """
    rows = (part[0].transpose(0, 1) for part in (query, key, value))  # [tokens, heads, head size]
    bounds, most = cu_seq_lens_q.to(query.device, torch.int32), int(max_length_q)
    out = torch.ops.aten._flash_attention_forward(*rows, bounds, bounds, most, most, 0.0, False, False, scale=scaling)[
        0
    ]
    return out[None], None
