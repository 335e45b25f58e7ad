"""Experts plugin that keeps the dequantized weights in float32 and goes through the experts one by one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import ELEMENTS, ExpertsCapabilities, ExpertsContext, QuantizedWeight
from slotline.registry.descriptor import Descriptor, Kind

Packed = Mapping[str, torch.Tensor]


class FloatExperts:
    """Mixture with weights that were dequantized when they were packed."""

    def __init__(self, context: ExpertsContext) -> None:
        self.context = context

    def pack(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> Packed:
        packed = {"gate_up": gate_up.dequantize(), "down": down.dequantize()}
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return packed | {name: bias.float() for name, bias in biases.items() if bias is not None}

    def apply(
        self, x: torch.Tensor, packed: Packed, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros(x.shape, device=x.device)
        for index in range(self.context.experts):
            token, place = torch.where(topk_ids == index)
            found = self.expert(x[token].float(), packed, index)
            out.index_add_(0, token, found * topk_weights[token, place, None].float())
        return out.to(x.dtype)

    def expert(self, x: torch.Tensor, packed: Packed, index: int) -> torch.Tensor:
        """Return the outputs of one expert."""
        inner = self.product(x, packed, "gate_up", index)
        return self.product(self.activate(inner), packed, "down", index)

    def product(self, x: torch.Tensor, packed: Packed, name: str, index: int) -> torch.Tensor:
        """Return one product with its bias."""
        bias = packed.get(f"{name}_bias")
        return functional.linear(x, packed[name][index], None if bias is None else bias[index])

    def activate(self, inner: torch.Tensor) -> torch.Tensor:
        """Return the input of the second product."""
        gate, up = (inner[:, ::2], inner[:, 1::2]) if self.context.interleaved else inner.chunk(2, -1)
        if self.context.activation == "swiglu_oai":
            return self.limited(gate, up)
        if self.context.activation == "relu":
            return gate.relu() * up
        if self.context.activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh" if self.context.activation == "gelu_tanh" else "none") * up

    def limited(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the activation of GPT-OSS."""
        limit, alpha = self.context.constants["limit"], self.context.constants["alpha"]
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    def num_bytes(self) -> int:
        context = self.context
        return 4 * context.experts * context.in_features * (context.out_features + context.out_features // 2)


class AllExperts(FloatExperts):
    """Mixture that computes every expert for every token."""

    def apply(
        self, x: torch.Tensor, packed: Packed, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        count = self.context.experts
        shares = torch.zeros(x.shape[0], count + 1, device=x.device)
        shares.scatter_add_(1, topk_ids, topk_weights.float())
        every = torch.stack([self.expert(x.float(), packed, index) for index in range(count)], 1)
        chosen = shares[:, :count, None] != 0
        return (torch.where(chosen, every, 0.0) * shares[:, :count, None]).sum(1).to(x.dtype)


descriptor = Descriptor(
    kind=Kind.EXPERTS,
    name="float_experts",
    capabilities=ExpertsCapabilities(
        devices=Set(("cpu", "cuda")),
        dtypes=Set(("float32", "bfloat16", "float16")),
        schemes=Set(tuple(ELEMENTS)),
        ragged=Flag(True),
        offsets=Flag(True),
        activations=Set(("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")),
        bias=Flag(True),
    ),
    factory=FloatExperts,
    summary="dequantizes all experts when they are packed",
)
all_experts = Descriptor(
    kind=Kind.EXPERTS,
    name="all_experts",
    capabilities=descriptor.capabilities,
    factory=AllExperts,
    summary="computes every expert for every token",
)
