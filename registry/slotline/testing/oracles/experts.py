"""Expected output of a mixture of experts with quantized weights in float64, and the allowed error of a plugin."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slotline.registry.contracts import ExpertsContext, QuantizedWeight
from slotline.testing.oracles import linear

ROUNDINGS = 10.0
"""Roundings to the activations' dtype that are allowed, in parts of the size of what an expert adds up: inputs, both
weights, the values between the products, the routing weights and the result."""

ACCUMULATION = 256.0
"""Float32 epsilons of the same size that are always allowed."""

ROUNDED = {"int8": 2.0**-3, "fp8": 2.0**-2}
"""Further parts of the same size for plugins that round the inputs of both products to that form."""


def expert(weight: QuantizedWeight, index: int) -> torch.Tensor:
    """Return the weight [out_features, in_features] of one expert in float64."""
    offsets = None if weight.offsets is None else weight.offsets[index]
    one = QuantizedWeight(scheme=weight.scheme, codes=weight.codes[index], scales=weight.scales[index], offsets=offsets)
    return linear.weight_of(one)


def activate(inner: torch.Tensor, context: ExpertsContext) -> torch.Tensor:
    """Return the input of the second product from the output of the first, [n, out_features / 2]."""
    half = inner.shape[-1] // 2
    places = torch.arange(half)
    gate = inner[..., 2 * places if context.interleaved else places]
    up = inner[..., 2 * places + 1 if context.interleaved else places + half]
    if context.activation == "swiglu_oai":
        limit, alpha = context.constants["limit"], context.constants["alpha"]
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if context.activation == "relu":
        return gate.clamp(min=0) * up
    if context.activation == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    if context.activation == "gelu_tanh":
        inside = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate * 0.5 * (1 + torch.tanh(inside)) * up
    return gate * torch.sigmoid(gate) * up


def mixture(
    x: torch.Tensor,
    weights: tuple[QuantizedWeight, QuantizedWeight],
    biases: Sequence[torch.Tensor | None],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    context: ExpertsContext,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [tokens, in_features] in float64, and the size of what adds up to each."""
    inputs, chosen, shares = x.cpu().double(), topk_ids.cpu(), topk_weights.cpu().double()
    out = torch.zeros_like(inputs)
    size = torch.zeros(inputs.shape[0], 1, dtype=torch.float64)
    first_bias, second_bias = (None if bias is None else bias.cpu().double() for bias in biases)
    for index in sorted({int(one) for one in chosen.flatten()} - {context.experts}):
        token, place = torch.where(chosen == index)
        inner = inputs[token] @ expert(weights[0], index).T
        inner = inner if first_bias is None else inner + first_bias[index]
        found = activate(inner, context) @ expert(weights[1], index).T
        found = found if second_bias is None else found + second_bias[index]
        share = shares[token, place, None]
        out.index_add_(0, token, found * share)
        size.index_add_(0, token, found.square().mean(1, keepdim=True).sqrt() * share.abs())
    return out, size


def allowed(out: torch.Tensor, size: torch.Tensor, dtype: torch.dtype, activation: str = "") -> torch.Tensor:
    """Return the allowed error of each output.

    Args:
        out, size: what `mixture` returned.
        dtype: of activations.
        activation: what the plugin rounds them to, "" for nothing.
    """
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    factor = ROUNDINGS * eps + ACCUMULATION * single + ROUNDED.get(activation, 0.0)
    return factor * (size + out.abs()) + 1e-30
