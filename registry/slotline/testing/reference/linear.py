"""Linear plugin that keeps the dequantized weight in float32, and one that keeps the codes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slotline.registry.capability import Flag, GraphSupport, Level, Set
from slotline.registry.contracts import LinearCapabilities, LinearContext, QuantizedWeight
from slotline.registry.contracts.weights import ELEMENTS
from slotline.registry.descriptor import Descriptor, Kind


class FloatWeights:
    """Product with a weight that was dequantized when it was packed."""

    def __init__(self, context: LinearContext) -> None:
        self.context = context

    def pack(self, weight: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        return {"weight": self.dequantized(weight)}

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        return (x.float() @ packed["weight"].T).to(x.dtype)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return 4 * out_features * in_features

    def dequantized(self, weight: QuantizedWeight) -> torch.Tensor:
        """Return the weight in float32."""
        return self.values(weight) * self.spread(weight, weight.scales) + self.offsets(weight)

    def values(self, weight: QuantizedWeight) -> torch.Tensor:
        """Return the number of each code."""
        return weight.values()

    def offsets(self, weight: QuantizedWeight) -> torch.Tensor | float:
        """Return what is added to each number."""
        return 0.0 if weight.offsets is None else self.spread(weight, weight.offsets)

    def spread(self, weight: QuantizedWeight, scales: torch.Tensor) -> torch.Tensor:
        """Return the scale of each code."""
        return scales[self.rows(weight)][:, self.columns(weight)]

    def rows(self, weight: QuantizedWeight) -> torch.Tensor:
        """Return the group of each output."""
        size = weight.scheme.group[0] or weight.out_features
        return torch.arange(weight.out_features, device=weight.codes.device) // size

    def columns(self, weight: QuantizedWeight) -> torch.Tensor:
        """Return the group of each input."""
        if weight.g_idx is not None:
            return weight.g_idx.long()
        size = weight.scheme.group[1] or weight.in_features
        return torch.arange(weight.in_features, device=weight.codes.device) // size


class RoundedInputs(FloatWeights):
    """The same, for inputs that were rounded before too."""

    def rounded_groups(self) -> int:
        """Return the number of groups of inputs that have a scale of their own."""
        size = self.context.in_features
        return size // 32 if size % 32 == 0 else 1

    def apply_rounded(
        self, codes: torch.Tensor, scales: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int
    ) -> torch.Tensor:
        """Return the product of inputs that are codes times scales."""
        groups = codes.unflatten(1, (scales.shape[1], -1))
        out = self.apply(self.scaled(groups.float(), scales).flatten(1), packed, out_features)
        return out.to(getattr(torch, self.context.dtype))

    def scaled(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return codes [tokens, groups, size] times their scales [tokens, groups]."""
        return groups * scales[..., None]


class GroupSums(FloatWeights):
    """Product that adds up a group before it multiplies by the scale."""

    def pack(self, weight: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        packed = {"values": self.values(weight), "scales": weight.scales, "groups": self.columns(weight)}
        return packed if weight.offsets is None else packed | {"offsets": weight.offsets}

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        block = self.context.scheme.group[0] or out_features
        row = torch.arange(out_features, device=x.device) // block
        out = torch.zeros(x.shape[0], out_features, device=x.device)
        for group in range(packed["scales"].shape[1]):
            own = packed["groups"] == group
            inputs = x.float()[:, own]
            out += inputs @ packed["values"][:, own].T * packed["scales"][row, group]
            if "offsets" in packed:
                out += inputs.sum(1, keepdim=True) * packed["offsets"][row, group]
        return out.to(x.dtype)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        rows, columns = self.context.scheme.scale_shape(out_features, in_features)
        scales = rows * columns * (1 if self.context.scheme.symmetric else 2)
        return 4 * out_features * in_features + 4 * scales + 8 * in_features


_CAPABILITIES = LinearCapabilities(
    devices=Set(("cpu", "cuda")),
    dtypes=Set(("float32", "bfloat16", "float16")),
    schemes=Set(tuple(ELEMENTS)),
    ragged=Flag(True),
    offsets=Flag(True),
    act_order=Flag(True),
    graphs=Level(GraphSupport.NEVER),
)

descriptor = Descriptor(
    kind=Kind.LINEAR,
    name="float_weights",
    capabilities=_CAPABILITIES,
    factory=FloatWeights,
    summary="dequantizes a weight when it is packed",
)
group_sums = Descriptor(
    kind=Kind.LINEAR,
    name="group_sums",
    capabilities=_CAPABILITIES,
    factory=GroupSums,
    summary="adds up a group before it multiplies by its scale",
)
