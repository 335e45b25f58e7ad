"""Products with four-bit weights by PyTorch's kernel for GPUs, whose tensor cores serve several tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slotline.registry.contracts.linear import LinearContext
from slotline.registry.contracts.weights import QuantizedWeight

_TILES = 8
"""Tiles of 16 inputs that a thread block reads at a time."""


class TinygemmLinear:
    """Product of one scheme and size. See `slotline.registry.contracts.linear.Linear`.

    Scales and offsets are kept in bfloat16, as the kernel takes them.
    """

    def __init__(self, context: LinearContext) -> None:
        self._group = context.scheme.group[1]

    def pack(self, weight: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        nibbles = (weight.codes + 8).to(torch.uint8)
        pairs = nibbles[:, ::2] << 4 | nibbles[:, 1::2]
        offsets = torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets
        both = torch.stack((weight.scales, offsets), -1)  # [out, groups, 2]
        return {
            "codes": torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), _TILES),
            "scales": both.transpose(0, 1).to(torch.bfloat16).contiguous(),
        }

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, out_features)
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm(x, packed["codes"], self._group, packed["scales"])
        return out

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return out_features * in_features // 2 + out_features * (in_features // self._group) * 4
