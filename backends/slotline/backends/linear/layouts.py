"""Forms of canonical weights that several products share."""

from __future__ import annotations

import torch

from slotline.registry.contracts.weights import QuantizedWeight
from slotline.registry.errors import ModelError


def for_each_output(part: torch.Tensor, block: int, out_features: int) -> torch.Tensor:
    """Return scales or offsets [.., row groups, column groups] for each output, [.., out_features, column groups].

    Args:
        block: rows of a group, as in `WeightScheme.group`. Parts that were joined have a group for each output already.
    """
    if part.shape[-2] == out_features:
        return part
    if part.shape[-2] == 1:
        return part.expand(*part.shape[:-2], out_features, -1)
    return part.repeat_interleave(block, -2)[..., :out_features, :]


def input_order(weight: QuantizedWeight, groups: int) -> torch.Tensor | None:
    """Return the inputs [in_features] int64 in order of their groups. None without act order.

    Raises:
        ModelError: if the groups have unequal numbers of inputs.
    """
    if weight.g_idx is None:
        return None
    if not torch.equal(weight.g_idx.bincount(), torch.full((groups,), weight.in_features // groups)):
        raise ModelError(
            f"g_idx puts unequal numbers of inputs into {groups} groups", fix='set weights.linear = "dequantized"'
        )
    return weight.g_idx.long().argsort(stable=True)
