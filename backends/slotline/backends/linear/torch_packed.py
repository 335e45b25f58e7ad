"""Linear plugins `torch_int8` and `torch_int4`: torch's own CPU kernels for packed weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slotline.registry.contracts.linear import LinearContext
from slotline.registry.contracts.weights import QuantizedWeight

_INNER_TILES = 1
"""An argument of torch's packing that a CPU does not read."""


class TorchInt8:
    """Product with codes of eight bits and a scale for each output.

    The scales are applied to the product in float32: torch's kernel would round them to the activations' dtype.
    """

    def __init__(self, context: LinearContext) -> None:
        self._ones: dict[int, torch.Tensor] = {}

    def pack(self, weight: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        scales = weight.scales.expand(weight.out_features, 1).flatten().contiguous()
        return {"codes": weight.codes.contiguous(), "scales": scales}

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        ones = self._ones.get(out_features)
        if ones is None:
            ones = self._ones[out_features] = torch.ones(out_features, dtype=x.dtype)
        product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, packed["codes"], ones)
        return (product * packed["scales"]).to(x.dtype)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return out_features * in_features + 4 * out_features


class TorchInt4:
    """Product with codes of four bits in groups. Scales and offsets are rounded to the activations' dtype."""

    def __init__(self, context: LinearContext) -> None:
        self._dtype: torch.dtype = getattr(torch, context.dtype)
        self._group = context.scheme.group[1]
        self._symmetric = context.scheme.symmetric

    def pack(self, weight: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int() + 8, _INNER_TILES)
        offsets = torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets
        both = torch.stack((weight.scales.T, offsets.T), -1)  # [groups, out_features, 2]
        return {"codes": codes, "scales_and_offsets": both.to(self._dtype).contiguous()}

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        if x.shape[0] == 0:
            return x.new_empty(0, out_features)
        product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, packed["codes"], self._group, packed["scales_and_offsets"]
        )
        return product

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return out_features * in_features // 2 + in_features // self._group * out_features * 2 * self._dtype.itemsize
