"""Products that dequantize the weight each time: right for every scheme, slow, and small in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from slotline.backends.linear.mixtures import ExpertByExpert
from slotline.registry.contracts.experts import ExpertsContext
from slotline.registry.contracts.linear import LinearContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme

_OPTIONAL = ("offsets", "g_idx")
_TILE = 16
"""Rows of a product that must be bitwise the same in any batch. A library orders its sums by the number of rows."""


class DequantizedLinear:
    """Product of one scheme and size. See `slotline.registry.contracts.linear.Linear`."""

    def __init__(self, context: LinearContext) -> None:
        self._scheme, self._dtype = context.scheme, getattr(torch, context.dtype)
        self._product = _tiled if context.batch_invariant else functional.linear

    def pack(self, weight: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        return packed_codes(weight)

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        return self._product(x, unpacked(self._scheme, packed, x.shape[1]).dequantize(self._dtype))

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return code_bytes(self._scheme, out_features, in_features)


class DequantizedExperts(ExpertByExpert):
    """Mixture of one scheme and size. See `slotline.registry.contracts.experts.Experts`."""

    def __init__(self, context: ExpertsContext) -> None:
        super().__init__(context)
        self._dtype = getattr(torch, context.dtype)

    def pack(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> Mapping[str, torch.Tensor]:
        packed: dict[str, torch.Tensor] = {}
        for name, weight, bias in (("gate_up", gate_up, gate_up_bias), ("down", down, down_bias)):
            packed |= {f"{name}_{key}": tensor for key, tensor in packed_codes(weight).items()}
            packed |= {} if bias is None else {f"{name}_bias": bias}
        return packed

    def num_bytes(self) -> int:
        context = self._context
        first = code_bytes(context.scheme, context.out_features, context.in_features)
        return context.experts * (first + code_bytes(context.scheme, context.in_features, context.out_features // 2))

    def _product(
        self, name: str, x: torch.Tensor, packed: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight = unpacked(self._context.scheme, packed, x.shape[1]).dequantize(self._dtype)
        return functional.linear(x, weight, None if bias is None else bias.to(self._dtype))


def _tiled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.T`` in products of `_TILE` rows each, the last one padded with zeros."""
    padded = functional.pad(x, (0, 0, 0, -len(x) % _TILE))
    parts = [functional.linear(part, weight) for part in padded.split(_TILE)]
    return torch.cat(parts)[: len(x)]


def packed_codes(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight by name, codes of four bits two in a byte, the first one low."""
    codes = weight.codes
    if weight.scheme.element.bits == 4:
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        pairs = codes.view(torch.uint8).unflatten(-1, (-1, 2)) & 15
        codes = pairs[..., 0] | (pairs[..., 1] << 4)
    packed = {"codes": codes, "scales": weight.scales}
    return packed | {name: tensor for name in _OPTIONAL if (tensor := getattr(weight, name)) is not None}


def unpacked(scheme: WeightScheme, packed: Mapping[str, torch.Tensor], in_features: int) -> QuantizedWeight:
    """Return the weight of `packed_codes`."""
    codes = packed["codes"]
    if scheme.element.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :in_features]
        if scheme.element.codes == "int8":
            codes = (codes ^ 8).view(torch.int8) - 8  # two's complement of four bits
    return QuantizedWeight(
        scheme=scheme, codes=codes, scales=packed["scales"], offsets=packed.get("offsets"), g_idx=packed.get("g_idx")
    )


def code_bytes(scheme: WeightScheme, out_features: int, in_features: int) -> int:
    """Return the bytes of the tensors of `packed_codes`."""
    scales = torch.Size(scheme.scale_shape(out_features, in_features)).numel() * (1 if scheme.symmetric else 2) * 4
    width = -(-in_features // 2) if scheme.element.bits == 4 else in_features
    return out_features * width + scales + (4 * in_features if scheme.act_order else 0)
