"""The pass of `layer_tail` where it may apply: that module imports numba, which a GPU does without."""

from __future__ import annotations

from torch import nn

from slotline.plugins.model_families.passes.target import Target


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Give a tail to every lean layer for which it is equal and faster, see `layer_tail.apply`."""
    if not target.packs or target.products == "onednn":
        return ()
    from slotline.plugins.model_families.passes import layer_tail

    return layer_tail.apply(model, target)
