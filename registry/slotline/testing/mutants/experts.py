"""Broken experts plugins, one bug each, and right ones that differ."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from slotline.registry.capability import Flag
from slotline.registry.contracts import QuantizedWeight
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference import experts as reference
from slotline.testing.reference.experts import FloatExperts, Packed

Tensor = torch.Tensor


class NoWeights(FloatExperts):
    def apply(self, x: Tensor, packed: Packed) -> Tensor:  # type: ignore[override]
        return x


class NoOffsets(FloatExperts):
    def pack(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Packed:
        first, second = (attrs.evolve(weight, offsets=None) for weight in (gate_up, down))
        return super().pack(first, second, gate_up_bias, down_bias)


class OneScale(FloatExperts):
    def pack(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Packed:
        if self.context.scheme.granularity == "tensor":
            gate_up = attrs.evolve(gate_up, scales=gate_up.scales[:, :1].expand_as(gate_up.scales))
        return super().pack(gate_up, down, gate_up_bias, down_bias)


class NeverInterleaved(FloatExperts):
    def activate(self, inner: Tensor) -> Tensor:
        if self.context.interleaved:
            return FloatExperts(attrs.evolve(self.context, interleaved=False)).activate(inner)
        return super().activate(inner)


class UpIsGate(FloatExperts):
    def activate(self, inner: Tensor) -> Tensor:
        return super().activate(inner.roll(1 if self.context.interleaved else inner.shape[1] // 2, 1))


class OneGelu(FloatExperts):
    def activate(self, inner: Tensor) -> Tensor:
        if self.context.activation == "gelu":
            return FloatExperts(attrs.evolve(self.context, activation="gelu_tanh")).activate(inner)
        return super().activate(inner)


class Unlimited(FloatExperts):
    def limited(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * torch.sigmoid(self.context.constants["alpha"] * gate) * (up + 1)


class FirstBias(FloatExperts):
    def product(self, x: Tensor, packed: Packed, name: str, index: int) -> Tensor:
        own = {key: t[:1].expand_as(t) if key.endswith("bias") else t for key, t in packed.items()}
        return super().product(x, own, name, index)


class NoBias(FloatExperts):
    def product(self, x: Tensor, packed: Packed, name: str, index: int) -> Tensor:
        return super().product(x, {name: packed[name]}, name, index)


class NeedsTokens(FloatExperts):
    def apply(self, x: Tensor, packed: Packed, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        topk_ids.max()
        return super().apply(x, packed, topk_ids, topk_weights)


class OneBuffer(FloatExperts):
    buffer: Tensor | None = None

    def apply(self, x: Tensor, packed: Packed, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = super().apply(x, packed, topk_ids, topk_weights)
        if self.buffer is None or self.buffer.shape != out.shape:
            self.buffer = out.clone()
        return self.buffer.copy_(out)


class OtherBytes(FloatExperts):
    def num_bytes(self) -> int:
        return super().num_bytes() // self.context.experts


class WritesWeights(FloatExperts):
    def apply(self, x: Tensor, packed: Packed, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = super().apply(x, packed, topk_ids, topk_weights)
        topk_weights.mul_(2)
        return out


class LosesLastExpert(FloatExperts):
    def expert(self, x: Tensor, packed: Packed, index: int) -> Tensor:
        found = super().expert(x, packed, index)
        return found * 0 if len(x) > 24 and index == self.context.experts - 1 else found


class NoneIsLast(FloatExperts):
    def apply(self, x: Tensor, packed: Packed, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return super().apply(x, packed, topk_ids.clamp(max=self.context.experts - 1), topk_weights)


class Normalizes(FloatExperts):
    def apply(self, x: Tensor, packed: Packed, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return super().apply(x, packed, topk_ids, topk_weights.clamp(min=0))


class LosesTokens(FloatExperts):
    def apply(self, x: Tensor, packed: Packed, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = super().apply(x, packed, topk_ids, topk_weights)
        if len(x) in range(30, 36):
            out[24:] = 0
        return out


class WholeBatch(FloatExperts):
    def expert(self, x: Tensor, packed: Packed, index: int) -> Tensor:
        return super().expert(x, packed, index) + x.sum() * 0


class KeepsLast(FloatExperts):
    last: Packed

    def pack(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Packed:
        self.last = super().pack(gate_up, down, gate_up_bias, down_bias)
        return self.last

    def apply(self, x: Tensor, packed: Packed, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return super().apply(x, self.last, topk_ids, topk_weights)


class Variant(FloatExperts):
    def apply(self, x: Tensor, packed: Packed, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = super().apply(x, packed, topk_ids, topk_weights)
        return out if len(x) == 1 else out * torch.tensor(1 + 2 * torch.finfo(x.dtype).eps, dtype=x.dtype)


class Tires(FloatExperts):
    calls = 0

    def apply(self, x: Tensor, packed: Packed, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        self.calls += 1
        out = super().apply(x, packed, topk_ids, topk_weights)
        return out if self.calls <= 40 else out * 1.5


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
    _mutant("no-weights", "apply takes no experts", Level.CONTRACT, NoWeights),
    _mutant("no-offsets", "leaves offsets out", Level.NUMERICS, NoOffsets),
    _mutant("one-scale", "takes the scale of the gates for the ups", Level.NUMERICS, OneScale),
    _mutant("never-interleaved", "takes alternating gates and ups for two halves", Level.NUMERICS, NeverInterleaved),
    _mutant("up-is-gate", "activates the ups", Level.NUMERICS, UpIsGate),
    _mutant("one-gelu", "takes the tanh form for the exact one", Level.NUMERICS, OneGelu),
    _mutant("unlimited", "does not limit gates and ups", Level.NUMERICS, Unlimited),
    _mutant("first-bias", "takes the first expert's bias for all", Level.NUMERICS, FirstBias),
    _mutant("no-bias", "leaves biases out", Level.NUMERICS, NoBias),
    _mutant("needs-tokens", "fails without tokens", Level.NUMERICS, NeedsTokens),
    _mutant("one-buffer", "returns the same buffer again", Level.NUMERICS, OneBuffer),
    _mutant("other-bytes", "counts the bytes of one expert", Level.NUMERICS, OtherBytes),
    _mutant("writes-weights", "writes into the weights of the mixture", Level.NUMERICS, WritesWeights),
    _mutant("loses-last-expert", "loses the last expert of many tokens", Level.HOSTILE, LosesLastExpert),
    _mutant("none-is-last", "takes no expert for the last one", Level.HOSTILE, NoneIsLast),
    _mutant("no-negative-weights", "takes negative weights for zero", Level.HOSTILE, Normalizes),
    _mutant("loses-tokens", "loses tokens from the 25th of 30 to 35", Level.HOSTILE, LosesTokens),
    _mutant("whole-batch", "a token of NaN reaches others of its expert", Level.HOSTILE, WholeBatch),
    _mutant("keeps-last", "computes with the layer packed last", Level.HOSTILE, KeepsLast),
    _mutant("variant", "is declared invariant and is not", Level.HOSTILE, Variant, batch_invariant=Flag(True)),
    _mutant("tires", "gives another result after 40 calls", Level.STATEFUL, Tires),
)

CORRECT: tuple[Correct, ...] = (
    Correct("the experts one by one", reference.descriptor),
    Correct("every expert for every token", reference.all_experts),
)
