"""Broken linear plugins, one bug each, and right ones that differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from slotline.registry.capability import Flag
from slotline.registry.contracts import LinearContext, QuantizedWeight
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference import linear as reference
from slotline.testing.reference.linear import FloatWeights

Packed = Mapping[str, torch.Tensor]


class OneArgument(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:  # type: ignore[override]
        return super().apply(x, packed, 0)


class NoOffsets(FloatWeights):
    def offsets(self, weight: QuantizedWeight) -> float:
        return 0.0


class NegativeOffsets(FloatWeights):
    def offsets(self, weight: QuantizedWeight) -> torch.Tensor | float:
        return -super().offsets(weight)


class NoOrder(FloatWeights):
    def columns(self, weight: QuantizedWeight) -> torch.Tensor:
        size = weight.scheme.group[1] or weight.in_features
        return torch.arange(weight.in_features, device=weight.codes.device) // size


class UnsignedCodes(FloatWeights):
    def values(self, weight: QuantizedWeight) -> torch.Tensor:
        codes = weight.codes
        if codes.dtype == torch.int8:
            return torch.where(codes < 0, codes.float() + 2**weight.scheme.element.bits, codes.float())
        return super().values(weight)


class SwappedNibbles(FloatWeights):
    def values(self, weight: QuantizedWeight) -> torch.Tensor:
        values = super().values(weight)
        if weight.scheme.element.bits == 4:
            values = values.view(*values.shape[:-1], -1, 2).flip(-1).view(values.shape)
        return values


class FirstScale(FloatWeights):
    def columns(self, weight: QuantizedWeight) -> torch.Tensor:
        return torch.zeros_like(super().columns(weight))


class TransposedBlocks(FloatWeights):
    def spread(self, weight: QuantizedWeight, scales: torch.Tensor) -> torch.Tensor:
        if weight.scheme.granularity == "block":
            scales = scales.T.reshape(scales.shape)
        return super().spread(weight, scales)


class DoubleType(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        return super().apply(x, packed, out_features).double()


class WritesInputs(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        x.mul_(2)
        return super().apply(x, packed, out_features) / 2


class OneBuffer(FloatWeights):
    def __init__(self, context: LinearContext) -> None:
        super().__init__(context)
        self.buffers: dict[Any, torch.Tensor] = {}

    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        out = super().apply(x, packed, out_features)
        return self.buffers.setdefault((tuple(out.shape), out.dtype), out).copy_(out)


class NeedsTokens(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        x.abs().max()
        return super().apply(x, packed, out_features)


class OtherBytes(FloatWeights):
    def num_bytes(self, out_features: int, in_features: int) -> int:
        return out_features * in_features // 2


class Noise(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        out = super().apply(x, packed, out_features)
        return out * (1 + 1e-6 * torch.rand_like(out, dtype=torch.float32)).to(out.dtype)


class LosesLastInput(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        weight = packed["weight"].clone()
        weight[:, -1] = 0
        return super().apply(x, {"weight": weight}, out_features)


class BordersLate(FloatWeights):
    def columns(self, weight: QuantizedWeight) -> torch.Tensor:
        found = super().columns(weight)
        if weight.scheme.granularity == "block":
            found = found.roll(1)
            found[0] = 0
        return found


class WholeBlocks(FloatWeights):
    def rows(self, weight: QuantizedWeight) -> torch.Tensor:
        size = weight.scheme.group[0]
        return super().rows(weight).clamp(max=max(weight.out_features // size - 1, 0)) if size else super().rows(weight)


class SymmetricRange(FloatWeights):
    def values(self, weight: QuantizedWeight) -> torch.Tensor:
        if weight.codes.dtype == torch.int8:
            return super().values(weight).clamp(min=-weight.scheme.element.high)
        return super().values(weight)


class NoSubnormals(FloatWeights):
    def values(self, weight: QuantizedWeight) -> torch.Tensor:
        values = super().values(weight)
        return values.where(values.abs() >= 2.0**-6, 0.0) if weight.scheme.name == "fp8" else values


class AbsoluteScales(FloatWeights):
    def spread(self, weight: QuantizedWeight, scales: torch.Tensor) -> torch.Tensor:
        return super().spread(weight, scales.abs() if scales is weight.scales else scales)


class EvenOutputs(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        out = super().apply(x, packed, out_features)
        out[:, out_features // 2 * 2 :] = 0
        return out


class TilesOfEight(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        out = super().apply(x, packed, out_features)
        whole = len(x) // 8 * 8
        if len(x) in range(25, 32):
            out[whole:] = 0
        return out


class WholeBatch(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        scale = x.abs().float().amax() if len(x) else x.new_ones(())
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        return (super().apply((x / scale).float(), packed, out_features) * scale).to(x.dtype)


class KeepsLast(FloatWeights):
    last: torch.Tensor

    def pack(self, weight: QuantizedWeight) -> Packed:
        packed = super().pack(weight)
        self.last = packed["weight"]
        return packed

    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        return super().apply(x, {"weight": self.last}, out_features)


class ByAddress(FloatWeights):
    def __init__(self, context: LinearContext) -> None:
        super().__init__(context)
        self.weights: dict[int, torch.Tensor] = {}

    def pack(self, weight: QuantizedWeight) -> Packed:
        packed = {"codes": weight.codes.clone(), "room": torch.zeros(3 * weight.codes.numel(), dtype=torch.uint8)}
        self.weights[packed["codes"].data_ptr()] = self.dequantized(weight)
        return packed

    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        return super().apply(x, {"weight": self.weights[packed["codes"].data_ptr()]}, out_features)


class OutputsOfContext(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        out = super().apply(x, packed, out_features)
        out[:, self.context.out_features :] = 0
        return out


class RowsOfContext(FloatWeights):
    def spread(self, weight: QuantizedWeight, scales: torch.Tensor) -> torch.Tensor:
        whole = self.context.scheme.scale_shape(self.context.out_features, 1)[0]
        return super().spread(weight, scales.flip(0) if 1 < len(scales) < whole else scales)


class Variant(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        out = super().apply(x, packed, out_features)
        return out if len(x) == 1 else out * torch.tensor(1 + 2 * torch.finfo(x.dtype).eps, dtype=x.dtype)


class RoughWhereInvariant(FloatWeights):
    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        rows = [super(RoughWhereInvariant, self).apply(row, packed, out_features) for row in x.split(1)]
        out = torch.cat(rows)
        return (out.to(torch.float8_e5m2) if self.context.batch_invariant else out).to(x.dtype)


class Tires(FloatWeights):
    calls = 0

    def apply(self, x: torch.Tensor, packed: Packed, out_features: int) -> torch.Tensor:
        self.calls += 1
        out = super().apply(x, packed, out_features)
        return out if self.calls <= 40 else out * 1.5


class ScalesLeftOut(reference.RoundedInputs):
    def scaled(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return groups


class FirstInputScale(reference.RoundedInputs):
    """Takes the scale of the first group for all inputs of a token."""

    def scaled(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return super().scaled(groups, scales[:, :1])


class FirstTokensScales(reference.RoundedInputs):
    """Takes the scales of the first token for all."""

    def scaled(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return super().scaled(groups, scales[:1])


class UnsignedInputs(reference.RoundedInputs):
    def scaled(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return super().scaled(groups % 256, scales)


class ScaledByTwice(reference.RoundedInputs):
    def scaled(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return super().scaled(super().scaled(groups, scales), scales)


class ClearsScales(reference.RoundedInputs):
    """Overwrites the scales after it has read them."""

    def scaled(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        found = super().scaled(groups, scales)
        scales.zero_()
        return found


class ThirdOfInputs(reference.RoundedInputs):
    """Says that there are groups that do not divide the inputs."""

    def rounded_groups(self) -> int:
        return self.context.in_features - 1


class FloatOfRounded(reference.RoundedInputs):
    """Returns float64 for inputs that were rounded."""

    def apply_rounded(self, codes: torch.Tensor, scales: torch.Tensor, packed: Any, out_features: int) -> torch.Tensor:
        return super().apply_rounded(codes, scales, packed, out_features).double()


def _mutant(name: str, summary: str, level: Level, factory: Any, **offer: Any) -> Mutant:
    changed = attrs.evolve(
        reference.descriptor,
        name=f"mutant_{name.replace('-', '_')}",
        summary=summary,
        factory=factory,
        capabilities=attrs.evolve(reference.descriptor.capabilities, **offer),
    )
    return Mutant(name, summary, level, changed)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("one-argument", "apply takes no number of outputs", Level.CONTRACT, OneArgument),
    _mutant("no-offsets", "leaves offsets out", Level.NUMERICS, NoOffsets),
    _mutant("negative-offsets", "takes offsets away", Level.NUMERICS, NegativeOffsets),
    _mutant("no-order", "declares act order and leaves it out", Level.NUMERICS, NoOrder),
    _mutant("unsigned-codes", "reads signed codes as unsigned ones", Level.NUMERICS, UnsignedCodes),
    _mutant("swapped-nibbles", "changes the two codes of a byte", Level.NUMERICS, SwappedNibbles),
    _mutant("first-scale", "takes the first group's scale for all inputs", Level.NUMERICS, FirstScale),
    _mutant("transposed-blocks", "reads the scales of blocks by columns", Level.NUMERICS, TransposedBlocks),
    _mutant("double-type", "returns float64", Level.NUMERICS, DoubleType),
    _mutant("writes-inputs", "writes into its inputs", Level.NUMERICS, WritesInputs),
    _mutant("one-buffer", "returns the same buffer again", Level.NUMERICS, OneBuffer),
    _mutant("needs-tokens", "fails without tokens", Level.NUMERICS, NeedsTokens),
    _mutant("other-bytes", "says that it holds an eighth of its bytes", Level.NUMERICS, OtherBytes),
    _mutant("noise", "gives other bits each time", Level.NUMERICS, Noise),
    _mutant("borders-late", "borders of blocks are one input late", Level.NUMERICS, BordersLate),
    _mutant("loses-last-input", "does not read the last input", Level.NUMERICS, LosesLastInput),
    _mutant("whole-blocks", "a last block of fewer outputs gets its neighbour's scale", Level.NUMERICS, WholeBlocks),
    _mutant("symmetric-range", "takes the lowest code for the one above it", Level.NUMERICS, SymmetricRange),
    _mutant("no-subnormals", "takes small float8 numbers for zero", Level.NUMERICS, NoSubnormals),
    _mutant("absolute-scales", "leaves out the sign of scales", Level.HOSTILE, AbsoluteScales),
    _mutant("even-outputs", "an odd last output is zero", Level.HOSTILE, EvenOutputs),
    _mutant("tiles-of-eight", "loses the last tokens of 25 to 31", Level.HOSTILE, TilesOfEight),
    _mutant("whole-batch", "scales by the largest input of the batch", Level.HOSTILE, WholeBatch),
    _mutant("keeps-last", "multiplies by the weight packed last", Level.HOSTILE, KeepsLast),
    _mutant("by-address", "finds a weight by the address of its tensor", Level.HOSTILE, ByAddress),
    _mutant("outputs-of-context", "has no more outputs than the context", Level.HOSTILE, OutputsOfContext),
    _mutant("rows-of-context", "takes a shard's scales in another order", Level.HOSTILE, RowsOfContext),
    _mutant("variant", "is declared invariant and is not", Level.HOSTILE, Variant, batch_invariant=Flag(True)),
    _mutant(
        "rough-where-invariant",
        "is wrong where the plan relies on its invariance",
        Level.HOSTILE,
        RoughWhereInvariant,
        batch_invariant=Flag(True),
    ),
    *(
        _mutant(name, summary, Level.NUMERICS, factory, rounded_inputs=Flag(True))
        for name, summary, factory in (
            ("rounded-unscaled", "leaves out the scales of rounded inputs", ScalesLeftOut),
            ("rounded-first-group", "takes the first scale of a token for all of its inputs", FirstInputScale),
            ("rounded-first-token", "takes the first token's scales for all tokens", FirstTokensScales),
            ("rounded-unsigned", "reads rounded inputs as unsigned bytes", UnsignedInputs),
            ("rounded-scaled-twice", "multiplies rounded inputs by their scales twice", ScaledByTwice),
            ("rounded-clears-scales", "overwrites the scales of rounded inputs", ClearsScales),
            ("rounded-groups-left", "has groups of inputs that do not divide them", ThirdOfInputs),
            ("rounded-double", "returns float64 for rounded inputs", FloatOfRounded),
        )
    ),
    _mutant("tires", "gives another result after 40 calls", Level.STATEFUL, Tires),
)

CORRECT: tuple[Correct, ...] = (
    Correct("the weight is dequantized when it is packed", reference.descriptor),
    Correct(
        "inputs may be rounded before",
        attrs.evolve(
            reference.descriptor,
            name="rounded_inputs",
            factory=reference.RoundedInputs,
            capabilities=attrs.evolve(reference.descriptor.capabilities, rounded_inputs=Flag(True)),
        ),
    ),
    Correct("a group is added up before it is scaled", reference.group_sums),
)
