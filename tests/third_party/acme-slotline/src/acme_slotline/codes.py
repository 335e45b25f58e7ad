"""Products with whole numbers: a group of inputs is added up before it meets its scale."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from slotline.registry.contracts import LinearContext, QuantizedWeight


class CodeLinear:
    """Product of one scheme and size. See `slotline.registry.contracts.Linear`."""

    def __init__(self, context: LinearContext) -> None:
        self._scheme = context.scheme

    def pack(self, weight: QuantizedWeight) -> Mapping[str, Tensor]:
        return {"codes": weight.codes, "scales": weight.scales}  # [outputs, inputs], [outputs, groups]

    def apply(self, x: Tensor, packed: Mapping[str, Tensor], out_features: int) -> Tensor:
        parts = (packed["scales"].shape[1], -1)
        inputs = x.float().unflatten(1, parts).transpose(0, 1)  # [groups, tokens, size]
        codes = packed["codes"].float().unflatten(1, parts).permute(1, 2, 0)  # [groups, size, outputs]
        return ((inputs @ codes) * packed["scales"].T[:, None]).sum(0).to(x.dtype)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        rows, groups = self._scheme.scale_shape(out_features, in_features)
        return out_features * in_features + 4 * rows * groups
