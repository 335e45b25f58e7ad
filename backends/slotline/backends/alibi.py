"""Attention with biases by distance: what a group's layers add to scores, on its device."""

from __future__ import annotations

import torch

from slotline.registry.contracts.attention import AttentionContext


def slopes_of(context: AttentionContext) -> torch.Tensor | None:
    """Return the slopes that all layers of a group have, [num_heads] float32. None for layers without ALiBi."""
    slopes = context.layers[0].alibi_slopes
    return None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=context.device)


def position_bias_of(context: AttentionContext) -> torch.Tensor | None:
    """Return the bias by distance that all layers of a group have, [num_heads, distances] float32. None for none."""
    bias = context.layers[0].position_bias
    return None if bias is None else torch.tensor(bias, dtype=torch.float32, device=context.device)
