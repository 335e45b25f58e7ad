"""The passes in their order."""

from __future__ import annotations

import torch
from torch import nn

from slotline.plugins.model_families.passes import (
    gated_mlp,
    lean_attention,
    lean_layer,
    merged_projections,
    packed_linear,
    rms_norm,
)
from slotline.plugins.model_families.passes.target import target_of

# Packing takes every linear layer that merging and fusing have left; the short attention forward needs both done.
PASSES = (
    rms_norm.apply,
    gated_mlp.apply,
    merged_projections.apply,
    packed_linear.apply,
    lean_attention.apply,
    lean_layer.apply,
)


def optimize(model: nn.Module, *, device: str, dtype: str | torch.dtype) -> tuple[str, ...]:
    """Edit a loaded decoder in place so that it computes the same with less work.

    Weights that a pass merges or packs replace the originals, so the model cannot be saved or cast afterwards. To
    reload weights, optimise a freshly loaded model the same way: both then have the same parameters and buffers by
    name, and each can be copied into its counterpart.

    Args:
        model: a transformers causal language model on its device, in evaluation mode.
        device: where it runs, e.g. ``cpu`` or ``cuda:0``.
        dtype: the weights' dtype or its name.

    Returns:
        A note for each thing done, or left out with the reason.

    Raises:
        slotline.registry.errors.ModelError: if the dtype is unknown.
    """
    target = target_of(device, dtype)
    notes: tuple[str, ...] = ()
    for apply in PASSES:
        with torch.no_grad():
            notes += apply(model, target)
    return notes
