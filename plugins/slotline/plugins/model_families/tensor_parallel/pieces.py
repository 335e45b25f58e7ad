"""Pieces of tensors: which numbers of a dimension belong to a rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from attrs import frozen
from torch import nn

from slotline.registry.contracts.model_family import Shard
from slotline.registry.errors import NegotiationError


@frozen
class Cut:
    """Cut of one dimension into parts for the ranks.

    Attributes:
        dim: the dimension.
        sections: sizes of the things that lie behind each other in it, each of which is divided by itself.
        unit: numbers that stay together, as those of a head.
        repeats: whether ranks share a unit if there are fewer units than ranks.
    """

    dim: int
    sections: tuple[int, ...]
    unit: int = 1
    repeats: bool = False

    def index(self, shard: Shard, name: str) -> torch.Tensor:
        """Return the places [n] int64 in the dimension that a rank has.

        Raises:
            NegotiationError: if a section cannot be divided among the ranks.
        """
        starts = [sum(self.sections[:number]) for number in range(len(self.sections))]
        pieces = [self._piece(size, shard, name) + start for size, start in zip(self.sections, starts, strict=True)]
        return torch.cat(pieces)

    def _piece(self, size: int, shard: Shard, name: str) -> torch.Tensor:
        units = size // self.unit
        if units * self.unit == size and units % shard.size == 0:
            length = size // shard.size
            return torch.arange(shard.rank * length, (shard.rank + 1) * length)
        if self.repeats and units * self.unit == size and units and shard.size % units == 0:
            first = shard.rank * units // shard.size * self.unit
            return torch.arange(first, first + self.unit)
        what = f"{units} heads of {self.unit}" if self.unit > 1 else f"size {size}"
        raise NegotiationError(
            f"parallel.tensor = {shard.size}: {what} of {name!r} cannot be divided among {shard.size} ranks",
            fix=f"set parallel.tensor to a divisor of {units}",
        )


def cut_parameter(module: nn.Module, name: str, cut: Cut, shard: Shard, title: str) -> None:
    """Replace a parameter or buffer of a module by a rank's part of it."""
    whole = getattr(module, name)
    index = cut.index(shard, title).to(whole.device)
    part = whole.detach().index_select(cut.dim % whole.dim(), index).contiguous()
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(part, requires_grad=False)
    else:
        module._buffers[name] = part


def cut_outputs(linear: nn.Linear, cut: Cut, shard: Shard, title: str) -> None:
    """Give a rank its outputs of a linear layer."""
    for name in ("weight", "bias"):
        if getattr(linear, name) is not None:
            cut_parameter(linear, name, Cut(0, cut.sections, cut.unit, cut.repeats), shard, title)
    linear.out_features = linear.weight.shape[0]


def cut_inputs(linear: nn.Linear, cut: Cut, shard: Shard, title: str) -> None:
    """Give a rank its inputs of a linear layer. The bias is added by rank 0 alone."""
    cut_parameter(linear, "weight", Cut(1, cut.sections, cut.unit, cut.repeats), shard, title)
    linear.in_features = linear.weight.shape[1]
    if linear.bias is not None and shard.rank > 0:
        linear.bias = nn.Parameter(torch.zeros_like(linear.bias), requires_grad=False)


def divides(sizes: Iterable[int], shard: Shard) -> bool:
    """Return True if every size can be divided among the ranks."""
    return all(size % shard.size == 0 for size in sizes)
