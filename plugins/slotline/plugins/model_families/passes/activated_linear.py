"""Linear layers of encoders with the activation as the last step of oneDNN's product.

Nothing else touches the intermediate values, the largest tensor of a step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from slotline.plugins.model_families.passes.equality import equal
from slotline.plugins.model_families.passes.gated_mlp import ACTIVATIONS
from slotline.plugins.model_families.passes.packed_linear import PackedLinear, has_hooks, is_plain_linear
from slotline.plugins.model_families.passes.target import Target

PAIRS = (("dense", "intermediate_act_fn"), ("lin1", "activation"))
"""Names of a linear layer and the activation behind it: BERT's and its kin's, and DistilBERT's."""

_linear = torch.ops.mkldnn._linear_pointwise.default


class ActivatedLinear(PackedLinear):
    """Packed linear layer with an activation.

    Args:
        index: the activation's place in `ACTIVATIONS`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, index: int) -> None:
        super().__init__(weight, bias)
        self._operation, self._algorithm = ACTIVATIONS[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        weight, bias = self._buffers["packed"], self._parameters["bias"]
        result: torch.Tensor = _linear(x, weight, bias, self._operation, [], self._algorithm)
        return result


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Fuse every pair whose fused form is equal. The activation's place is taken by nothing."""
    if not target.packs:
        return ()
    count = 0
    for module in list(model.modules()):
        for linear_name, activation_name in PAIRS:
            linear, activation = module._modules.get(linear_name), module._modules.get(activation_name)
            if activation is None or not is_plain_linear(linear, target) or has_hooks(activation):
                continue
            fused = _fuse(linear, activation, target)
            if fused is not None:
                setattr(module, linear_name, fused)
                setattr(module, activation_name, nn.Identity())
                count += 1
    return (f"fused the activation into {count} linear layers",) if count else ()


def _fuse(linear: nn.Linear, activation: nn.Module, target: Target) -> ActivatedLinear | None:
    plain = nn.Sequential(linear, activation)
    for index in range(len(ACTIVATIONS)):
        fused = ActivatedLinear(linear.weight, linear.bias, index)
        if target.decisions.decide(partial(equal, plain, fused, linear.in_features, linear.weight)):
            return fused
    return None
