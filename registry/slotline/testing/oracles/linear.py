"""Expected product with a quantized weight in float64, and the allowed error of a plugin.

The weight is computed here from its codes by code of our own: number of the code, times the scale of its group, plus
the group's offset.
"""

from __future__ import annotations

import torch

from slotline.registry.contracts.weights import QuantizedWeight

ROUNDINGS = 4.0
"""Roundings to the activations' dtype of each product's factors that are allowed, added as if independent.

A plugin may round weights, scales and inputs to that dtype, each to nearest. Errors of many terms add like the root of
the sum of their squares, of which one lost term of a few hundred is a larger part."""

ACCUMULATION = 64.0
"""Float32 epsilons of the same root that are always allowed: sums in any order, in float32."""

OUTPUT_ROUNDINGS = 2.0
"""Roundings of the result that are always allowed."""

_FP8_STEP, _INT8_STEPS = 2.0**-4, 127.0

_LAST: list[tuple[QuantizedWeight, list[tuple[int, int]], tuple[torch.Tensor, torch.Tensor]]] = []


def weight_of(weight: QuantizedWeight) -> torch.Tensor:
    """Return the weight [out_features, in_features] in float64."""
    scaled, offsets = _parts(weight)
    return scaled + offsets


def magnitude_of(weight: QuantizedWeight) -> torch.Tensor:
    """Return the sizes of what is added up to the weight: a scaled number and its offset may cancel."""
    scaled, offsets = _parts(weight)
    return scaled.abs() + offsets.abs()


def _parts(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled numbers and the offsets of a weight, each [out_features, in_features] float64.

    Those of the last weight are kept, as a check compares many products with one.
    """
    tensors = (weight.codes, weight.scales, weight.offsets, weight.g_idx)
    state = [(id(tensor), tensor._version) for tensor in tensors if tensor is not None]
    if not _LAST or _LAST[0][0] is not weight or _LAST[0][1] != state:
        _LAST[:] = [(weight, state, _computed_parts(weight))]
    return _LAST[0][2]


def _computed_parts(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.scheme.group
    out_features, in_features = weight.codes.shape
    row = torch.arange(out_features) // rows if rows else torch.zeros(out_features, dtype=torch.int64)
    if weight.g_idx is not None:
        column = weight.g_idx.cpu().long()
    else:
        column = torch.arange(in_features) // columns if columns else torch.zeros(in_features, dtype=torch.int64)
    codes, book = weight.codes.cpu(), weight.scheme.element.codebook
    numbers = torch.tensor(book, dtype=torch.float64)[codes.long()] if book else codes.double()
    scaled = numbers * weight.scales.cpu().double()[row][:, column]
    if weight.offsets is None:
        return scaled, torch.zeros_like(scaled)
    return scaled, weight.offsets.cpu().double()[row][:, column]


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, in_features] times a float64 weight, [tokens, out_features] float64."""
    return x.cpu().double() @ weight.T


def allowed(x: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype, activation: str = "") -> torch.Tensor:
    """Return the allowed error of each output [tokens, out_features].

    Args:
        x: the inputs.
        weight: the weight.
        dtype: of activations.
        activation: what the plugin rounds them to, "" for nothing.
    """
    inputs, exact, squares = x.cpu().double(), weight_of(weight), magnitude_of(weight).square()
    root = (inputs.square() @ squares.T).sqrt()
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    bound = (ROUNDINGS * (eps if dtype != torch.float32 else 0.0) + ACCUMULATION * single) * root
    if activation == "int8":
        step = inputs.abs().amax(1, keepdim=True) / _INT8_STEPS / 2
        bound = bound + ROUNDINGS * step * squares.sum(1).sqrt()
    elif activation == "fp8":
        bound = bound + ROUNDINGS * _FP8_STEP * root
    return bound + OUTPUT_ROUNDINGS * eps * (inputs @ exact.T).abs() + 1e-30
