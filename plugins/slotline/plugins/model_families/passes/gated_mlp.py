"""Gated MLPs with activation and product inside the matrix products, on a CPU.

``down(act(gate(x)) * up(x))`` becomes three oneDNN calls: gate with the activation as its last step, up with the
product as its last step, down. Nothing else touches the intermediate values.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from slotline.plugins.model_families.passes.equality import equal
from slotline.plugins.model_families.passes.packed_linear import PackedLinear, has_hooks, is_plain_linear, is_untouched
from slotline.plugins.model_families.passes.target import Target, slots

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ACTIVATIONS = (("swish", ""), ("gelu", "tanh"), ("gelu", "none"), ("relu", ""))
"""oneDNN's (operation, algorithm) names, tried in turn."""


class FusedGatedMLP(nn.Module):
    """Gated MLP. Its projections stay children by their usual names, so that adapters can replace them.

    Attributes:
        gate_proj, up_proj, down_proj: packed linear layers, or an adapter's replacements.
        act_fn: the original activation, for projections that were replaced.
        operation: oneDNN's name of the activation.
    """

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, act_fn: nn.Module, index: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = gate, up, down, act_fn
        self.operation, self._algorithm = ACTIVATIONS[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., hidden_size] to [..., hidden_size]."""
        return self.down_proj(self.gated(x))  # type: ignore[no-any-return]

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the down projection, [..., intermediate_size]."""
        gate, up = self._modules["gate_proj"], self._modules["up_proj"]
        if not (is_untouched(gate) and is_untouched(up)):
            return self.act_fn(self.gate_proj(x)) * self.up_proj(x)  # type: ignore[no-any-return]
        return up.times(x, gate.activated(x, self.operation, self._algorithm))


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Replace every gated MLP whose fused form is equal."""
    if not target.packs:
        return ()
    count = 0
    for parent, name, child in slots(model):
        fused = _fuse(child, target)
        if fused is not None:
            setattr(parent, name, fused)
            count += 1
    return (f"fused activation and product into {count} gated MLPs",) if count else ()


def _fuse(module: nn.Module, target: Target) -> FusedGatedMLP | None:
    if set(PROJECTIONS) | {"act_fn"} != set(module._modules) or has_hooks(module):
        return None
    linears = [module.get_submodule(name) for name in PROJECTIONS]
    if not all(is_plain_linear(linear, target) for linear in linears) or module._parameters:
        return None
    weight: torch.Tensor = linears[0].weight  # type: ignore[assignment]
    gate, up, down = (PackedLinear(each.weight, each.bias, target.way(each.weight)) for each in linears)  # type: ignore[arg-type]
    for index in range(len(ACTIVATIONS)):
        fused = FusedGatedMLP(gate, up, down, module.get_submodule("act_fn"), index)
        if target.decisions.decide(partial(equal, module, fused, gate.in_features, weight)):
            return fused
    return None
