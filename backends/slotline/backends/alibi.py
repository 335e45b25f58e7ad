"""Attention with linear biases (Press et al. 2021, arXiv 2108.12409): the slopes of a group's layers on its device."""

from __future__ import annotations

import torch

from slotline.registry.contracts.attention import AttentionContext


def slopes_of(context: AttentionContext) -> torch.Tensor | None:
    """Return the slopes that all layers of a group have, [num_heads] float32. None for layers without ALiBi."""
    slopes = context.layers[0].alibi_slopes
    return None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=context.device)
