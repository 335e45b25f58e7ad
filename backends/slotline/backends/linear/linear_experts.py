"""Experts plugins of our linear plugins for CPUs: each chosen expert is two products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.backends.linear.mixtures import ExpertByExpert
from slotline.backends.linear.numba_linear import NumbaLinear
from slotline.backends.linear.vnni_linear import VnniLinear
from slotline.registry.contracts.experts import ExpertsContext
from slotline.registry.contracts.linear import LinearContext
from slotline.registry.contracts.weights import QuantizedWeight


class LinearExperts(ExpertByExpert):
    """Mixture of one scheme and size. See `slotline.registry.contracts.experts.Experts`.

    Args:
        linear: class of the linear plugin's products.
    """

    def __init__(self, context: ExpertsContext, linear: type[Any]) -> None:
        super().__init__(context)
        sizes = {
            "gate_up": (context.out_features, context.in_features),
            "down": (context.in_features, context.out_features // 2),
        }
        self._sizes = sizes
        self._products = {name: linear(_linear_context(context, *size)) for name, size in sizes.items()}

    def pack(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> Mapping[str, torch.Tensor]:
        packed: dict[str, torch.Tensor] = {}
        for name, weight, bias in (("gate_up", gate_up, gate_up_bias), ("down", down, down_bias)):
            experts = [self._products[name].pack(_expert(weight, index)) for index in range(self._context.experts)]
            packed |= {f"{name}_{key}": torch.stack([one[key] for one in experts]) for key in experts[0]}
            packed |= {} if bias is None else {f"{name}_bias": bias}
        return packed

    def num_bytes(self) -> int:
        one = sum(product.num_bytes(*self._sizes[name]) for name, product in self._products.items())
        return self._context.experts * int(one)

    def _product(
        self, name: str, x: torch.Tensor, packed: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        out: torch.Tensor = self._products[name].apply(x, packed, self._sizes[name][0])
        return out if bias is None else out.add_(bias)


def numba_experts(context: ExpertsContext) -> LinearExperts:
    """Return a mixture whose products widen codes while they are read."""
    return LinearExperts(context, NumbaLinear)


def vnni_experts(context: ExpertsContext) -> LinearExperts:
    """Return a mixture whose products round activations to int8."""
    return LinearExperts(context, VnniLinear)


def _linear_context(context: ExpertsContext, out_features: int, in_features: int) -> LinearContext:
    return LinearContext(
        contract=context.contract,
        scheme=context.scheme,
        in_features=in_features,
        out_features=out_features,
        dtype=context.dtype,
        device=context.device,
        max_tokens=context.max_tokens,
    )


def _expert(weight: QuantizedWeight, index: int) -> QuantizedWeight:
    return QuantizedWeight(
        scheme=weight.scheme,
        codes=weight.codes[index],
        scales=weight.scales[index],
        offsets=None if weight.offsets is None else weight.offsets[index],
        input_scale=weight.input_scale,
    )
