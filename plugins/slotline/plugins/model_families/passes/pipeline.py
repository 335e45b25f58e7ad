"""The passes in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import evolve
from torch import nn

from slotline.plugins.model_families.passes import (
    activated_linear,
    cpu_tail,
    gated_attention,
    gated_mlp,
    gated_norm,
    huge_pages,
    invariant_linear,
    lean_attention,
    lean_head,
    lean_layer,
    lean_mlp,
    merged_projections,
    packed_linear,
    rms_norm,
    rotary,
)
from slotline.plugins.model_families.passes.cpu_products import Choice
from slotline.plugins.model_families.passes.decisions import Decisions, other_passes
from slotline.plugins.model_families.passes.target import Target, target_of
from slotline.registry.errors import ModelError, SlotlineError
from slotline.registry.loading import one_line

Pass = Callable[[nn.Module, Target], tuple[str, ...]]

# Packing takes every linear layer that merging and fusing have left; the short forwards need both done.
PASSES = (
    gated_norm.apply,
    rms_norm.apply,
    rotary.apply,
    lean_head.apply,
    gated_mlp.apply,
    merged_projections.apply,
    packed_linear.apply,
    huge_pages.apply,
    lean_attention.apply,
    gated_attention.apply,
    lean_mlp.apply,
    lean_layer.apply,
    cpu_tail.apply,
)


ENCODER_PASSES = (activated_linear.apply, merged_projections.apply_to_encoder, packed_linear.apply)
"""Those of encoders, on devices with packed weights."""

INVARIANT_PASSES = (rms_norm.apply, rotary.apply, invariant_linear.apply)
"""Those after which a token's numbers do not hang on the batch."""


def optimize(
    model: nn.Module,
    *,
    device: str,
    dtype: str | torch.dtype,
    batch_invariant: bool = False,
    captured: bool = False,
    decisions: Decisions | None = None,
    held: str = "",
    products: Choice = "onednn",
    joins: bool = True,
) -> tuple[str, ...]:
    """Edit a loaded decoder in place so that it computes the same with less work.

    Weights that a pass merges or packs replace the originals, so transformers cannot save or cast the model afterwards.
    To reload weights, optimise a freshly loaded model the same way: both then have the same parameters and buffers by
    name, and each can be copied into its counterpart.

    Args:
        model: a transformers causal language model on its device, in evaluation mode.
        device: where it runs, e.g. ``cpu`` or ``cuda:0``.
        dtype: the weights' dtype or its name.
        captured: whether forward passes are captured, which kernels that the host calls by address cannot be.
        batch_invariant: whether a token's numbers must be bitwise the same in any batch.
        decisions: takes the answers of the checks, or has those of an earlier run on the same model.
        held: device type of the weights, by default that of the model's first parameter.
        products: how a CPU's products are chosen. With `batch_invariant` or `captured` they are oneDNN's.
        joins: whether one kernel may compute all between two attentions.

    Returns:
        A note for each thing done, or left out with the reason.

    Raises:
        slotline.registry.errors.ModelError: if the dtype is unknown, or the model has parts whose numbers would hang on
            the batch where they must not.
    """
    held = held or next(model.parameters()).device.type
    target = target_for(device, dtype, captured=captured, held=held)
    fixed = batch_invariant or captured  # our kernel is called by address
    products = "onednn" if fixed else products
    target = evolve(target, decisions=decisions or Decisions(), products=products, joins=joins)
    notes = apply_passes(model, target, INVARIANT_PASSES if batch_invariant else PASSES)
    target.decisions.finish()
    return notes


def target_for(device: str, dtype: str | torch.dtype, *, captured: bool, held: str = "") -> Target:
    """Return the target of `optimize`, without kernels that cannot be tried or captured.

    Args:
        held: device type of the weights, by default the device's.
    """
    target = target_of(device, dtype)
    by_address = captured and target.device == "cpu"
    if by_address or (held or target.device) != target.device:
        return evolve(target, kernels=None, fused=None)  # its weights come to the device later: nothing can be tried
    return target


def apply_passes(model: nn.Module, target: Target, passes: Sequence[Pass] = PASSES) -> tuple[str, ...]:
    """Run passes for a target, by default all (see `optimize`)."""
    notes: tuple[str, ...] = ()
    for apply in passes:
        try:
            with torch.no_grad():
                notes += apply(model, target)
        except (SlotlineError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model's own code may do anything, and each change was checked when it was made
            if passes is INVARIANT_PASSES:
                raise ModelError(
                    f"{type(model).__name__} has parts that cannot be made independent of the batch: {one_line(error)}",
                    fix="set batch_invariant = false",
                ) from error
            if target.decisions.known:
                raise other_passes() from error
            target.decisions.complete = False
            name = apply.__module__.rpartition(".")[2]
            notes += (f"pass {name} stepped aside for {type(model).__name__}: {one_line(error)}",)
    return notes
