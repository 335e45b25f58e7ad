"""The passes in their order."""

from __future__ import annotations

import torch
from attrs import evolve
from torch import nn

from slotline.plugins.model_families.passes import (
    gated_mlp,
    lean_attention,
    lean_head,
    lean_layer,
    lean_mlp,
    merged_projections,
    packed_linear,
    rms_norm,
    rotary,
)
from slotline.plugins.model_families.passes.target import Target, target_of

# Packing takes every linear layer that merging and fusing have left; the short forwards need both done.
PASSES = (
    rms_norm.apply,
    rotary.apply,
    lean_head.apply,
    gated_mlp.apply,
    merged_projections.apply,
    packed_linear.apply,
    lean_attention.apply,
    lean_mlp.apply,
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
    if next(model.parameters()).device.type != target.device:
        target = evolve(target, kernels=None, fused=None)  # its weights come to the device later: nothing can be tried
    return apply_passes(model, target)


def apply_passes(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Run every pass for a target; see `optimize`."""
    notes: tuple[str, ...] = ()
    for apply in PASSES:
        with torch.no_grad():
            notes += apply(model, target)
    return notes
