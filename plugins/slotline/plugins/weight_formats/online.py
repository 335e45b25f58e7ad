"""Quantization of plain weights while a model is loaded: rounding to nearest, symmetric, without data."""

from __future__ import annotations

import torch

from slotline.registry.contracts.weight_format import WeightFormatContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme
from slotline.registry.errors import ModelError

GROUP = 32
"""Inputs of a group of int4."""
_LARGEST_FP8 = 448.0
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Last parts of the names of modules that choose experts. They are small, and an error in them changes the choice."""


class Online:
    """Quantizer of one model. See `slotline.registry.contracts.weight_format.OnlineFormat`.

    int8 and fp8 have a scale for each output, int4 has one for each 32 inputs of an output. With int4 the output
    projection has eight bits: its errors go straight into the logits. Plugins may round each token to eight bits too.
    """

    def __init__(self, context: WeightFormatContext) -> None:
        self._method = context.method

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        if name.rpartition(".")[2] in _ROUTERS:
            return None
        if self._method == "int4" and kind != "head":
            return WeightScheme(name="int4", group=(1, GROUP), activation="int8")
        if self._method == "fp8":
            return WeightScheme(name="fp8", group=(1, 0), activation="fp8")
        return WeightScheme(name="int8", group=(1, 0), activation="int8")

    def read(self, name: str, kind: str) -> QuantizedWeight:
        """Raise, because plain weights are quantized by `quantize`."""
        raise ModelError(f"{name}: weights.quantize reads no quantized weights", fix='set weights.quantize = ""')

    def quantize(self, name: str, kind: str, weight: torch.Tensor) -> QuantizedWeight:
        """See `OnlineFormat.quantize`."""
        scheme = self.scheme_of(name, kind)
        assert scheme is not None
        return quantize(name, scheme, weight)


def quantize(name: str, scheme: WeightScheme, weight: torch.Tensor) -> QuantizedWeight:
    """Return a weight [.., out_features, in_features] rounded to nearest in a symmetric scheme of outputs or groups.

    Raises:
        ModelError: if the groups do not divide the inputs, or values are not finite.
    """
    weight = weight.float()
    size = scheme.group[1] or weight.shape[-1]
    if weight.shape[-1] % size:
        raise ModelError(
            f"{name}: {weight.shape[-1]} inputs are not divided by groups of {size}",
            fix='set weights.quantize = "int8"',
        )
    parts = weight.unflatten(-1, (-1, size))  # [.., out_features, groups, size]
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    if not bool(torch.isfinite(extreme).all()):
        raise ModelError(f"{name}: the weight holds values that are not finite", fix="download the checkpoint again")
    element = scheme.element
    if scheme.name == "int4":  # the value of largest size becomes the code -8, as in Q4_0
        scales = extreme / element.low
    else:
        scales = extreme.abs() / (_LARGEST_FP8 if scheme.name == "fp8" else element.high)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = parts / scales
    if scheme.name == "fp8":
        codes = values.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    else:
        codes = values.round().clamp(element.low, element.high).to(torch.int8)
    return QuantizedWeight(scheme=scheme, codes=codes.flatten(-2), scales=scales.squeeze(-1))
