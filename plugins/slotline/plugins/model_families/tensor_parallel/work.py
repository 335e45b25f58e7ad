"""The division that is under way: cuts modules by a rank's part and notes where outputs are joined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import define, field
from torch import nn

from slotline.plugins.model_families.tensor_parallel.joined import Joined
from slotline.plugins.model_families.tensor_parallel.pieces import Cut, Section, cut_inputs, cut_outputs, cut_tensor
from slotline.registry.contracts.model_family import Shard


class UnknownPartError(Exception):
    """A module has a part of which no recipe knows how it is divided."""


@define(eq=False)
class Work:
    """One division.

    Attributes:
        shard: the rank's part.
        joined: where outputs are joined.
        done: modules that later recipes leave alone.
    """

    shard: Shard
    joined: Joined
    done: set[nn.Module] = field(factory=set)

    def outputs(self, name: str, linear: Any, cut: Cut) -> None:
        """Give the rank its outputs of a linear layer."""
        cut_outputs(linear, cut, self.shard, name)
        self.done.add(linear)

    def inputs(self, name: str, linear: Any, cut: Cut, *, joined: bool = True) -> None:
        """Give the rank its inputs of a linear layer, whose outputs are summed over the ranks here or later."""
        cut_inputs(linear, cut, self.shard, name)
        self.done.add(linear)
        if joined:
            self.joined.summed.append(name)

    def tensor(self, name: str, module: nn.Module, tensor: str, cut: Cut, dim: int = 0) -> None:
        """Give the rank its numbers of a parameter or buffer, if the module has it."""
        if getattr(module, tensor, None) is not None:
            cut_tensor(module, tensor, dim, cut, self.shard, f"{name}.{tensor}")

    def convolution(self, name: str, conv: Any, cut: Cut) -> None:
        """Give the rank its channels of a depthwise convolution."""
        for tensor in ("weight", "bias"):
            self.tensor(name, conv, tensor, cut)
        conv.in_channels = conv.out_channels = conv.groups = conv.weight.shape[0]
        self.done.add(conv)

    def finish(self, *modules: nn.Module) -> None:
        """Count a divided layer, and leave the modules and all in them alone from now on."""
        self.joined.divided += 1
        for module in modules:
            self.done.update(module.modules())

    def leave(self, name: str, module: nn.Module, reason: str) -> None:
        """Keep a module whole on each rank."""
        self.joined.whole[name] = reason
        self.done.update(module.modules())


def heads(count: int, unit: int = 1) -> Cut:
    """Return the cut of one thing for each head."""
    return Cut.of(Section(count, unit))


def has_numbers(module: nn.Module) -> bool:
    """Return True if a module has parameters of more than one number."""
    return any(parameter.numel() > 1 for parameter in module.parameters())


def parameters_of(module: nn.Module) -> Iterable[str]:
    """Return the names of a module's own parameters that are there."""
    return [name for name, parameter in module._parameters.items() if parameter is not None]
