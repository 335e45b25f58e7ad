"""Expected contribution of an adapter in float64, and the allowed error of a plugin.

The share of a module is ``inputs @ A^T @ B^T`` times ``alpha / r`` (Hu et al., "LoRA: Low-rank adaptation of large
language models", 2021, section 4.1), or times ``alpha / sqrt(r)`` if it is rank-stabilised (Kalajdzievski, 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve, field, frozen

Weights = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Module path -> A [rank, in_features] and B [out_features, rank]."""

BASELINE_FACTOR = 3.0
"""A plugin's error may be this many times that of torch's own products in the same dtype.

Measured on a CPU over eight right ways (the scale before, between or after the products, float32 inside, padded batched
products, merged weights) and 400 random shapes for each of float32, bfloat16 and float16: errors are 0.2 to 4.7 times
the baseline's, since the baseline is now and then exact by luck, and never above 0.36 of what is allowed in all."""

ACCUMULATION_ERRORS = 2.0
"""Float32 epsilons of the sum of magnitudes that are always allowed: where torch happens to be nearly exact, another
order of summation need not be."""

OUTPUT_ROUNDINGS = 2.0
"""Roundings of the result to the output dtype that are always allowed: one for the share, one for the sum."""


@frozen(eq=False)
class Adapter:
    """Weights of an adapter, already rounded to the model's dtype, and their scaling."""

    weights: Weights
    rank: int
    alpha: float
    rslora: bool = False
    alphas: Mapping[str, float] = field(factory=dict)  # module path -> its own alpha

    def scale(self, module: str) -> float:
        """Return the factor of a module's contribution."""
        rank = self.weights[module][0].shape[0]
        return self.alphas.get(module, self.alpha) / (rank**0.5 if self.rslora else rank)


def with_adapters(
    module: str,
    adapters: Sequence[Adapter | None],
    inputs: torch.Tensor,
    out: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return `out` [num_tokens, out_features] plus each token's adapter contribution, computed in `dtype`."""
    result = out.to(dtype).clone()
    for adapter in {id(one): one for one in adapters}.values():
        if adapter is not None and module in adapter.weights:
            tokens = [token for token, one in enumerate(adapters) if one is adapter]
            a, b = (weight.to(inputs.device, dtype) for weight in adapter.weights[module])
            result[tokens] += (inputs[tokens].to(dtype) @ a.T @ b.T) * adapter.scale(module)
    return result


@frozen(eq=False)
class Expected:
    """Expected result in float64, the error of torch's own products, and the allowed error."""

    values: torch.Tensor
    baseline: float
    allowed: float


def expected(module: str, adapters: Sequence[Adapter | None], inputs: torch.Tensor, out: torch.Tensor) -> Expected:
    """Return `out` with the contributions of at least one token, and its tolerance."""
    exact = with_adapters(module, adapters, inputs, out)
    baseline = float((with_adapters(module, adapters, inputs, out, out.dtype).double() - exact).abs().max())
    absolute = {id(one): None if one is None else _absolute(one, module) for one in adapters}
    magnitude = with_adapters(module, [absolute[id(one)] for one in adapters], inputs.abs(), out.abs()).max()
    floor = ACCUMULATION_ERRORS * torch.finfo(torch.float32).eps * float(magnitude)
    rounding = OUTPUT_ROUNDINGS * torch.finfo(out.dtype).eps * float(exact.abs().max())
    return Expected(exact, baseline, BASELINE_FACTOR * baseline + floor + rounding)


def _absolute(adapter: Adapter, module: str) -> Adapter:
    """Return the adapter on one module, with the absolute values of its weights."""
    found = adapter.weights.get(module)
    return evolve(adapter, weights={} if found is None else {module: (found[0].abs(), found[1].abs())})
