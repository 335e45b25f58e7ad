"""Pieces of tensors: which numbers of a dimension belong to a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import nn
from transformers.pytorch_utils import Conv1D

from slotline.plugins.model_families.tensor_parallel.parts import Taken, note
from slotline.registry.contracts.model_family import Shard
from slotline.registry.errors import NegotiationError


@frozen
class Section:
    """Things of one kind that lie behind each other in a dimension, each in one piece.

    Attributes:
        count: number of things, as heads.
        unit: numbers of one thing.
        repeats: whether ranks share a thing if there are fewer of them than ranks.
    """

    count: int
    unit: int = 1
    repeats: bool = False

    @property
    def size(self) -> int:
        """Return the number of all numbers."""
        return self.count * self.unit

    def index(self, shard: Shard, name: str) -> torch.Tensor:
        """Return the places [n] int64 in the section that a rank has.

        Raises:
            NegotiationError: if the things cannot be divided among the ranks.
        """
        count = share(self, shard, name)
        first = shard.rank * self.count // shard.size * self.unit
        return torch.arange(first, first + count * self.unit)


def share(section: Section, shard: Shard, name: str) -> int:
    """Return how many things of a section a rank has.

    Raises:
        NegotiationError: naming the module, the number and its divisors.
    """
    count = section.count
    if count % shard.size == 0:
        return count // shard.size
    if section.repeats and count and shard.size % count == 0:
        return 1
    what = f"{count} heads of {section.unit}" if section.unit > 1 else f"size {count}"
    fits = [n for n in range(1, count + 1) if count % n == 0]
    fits = fits if len(fits) < 9 else [*fits[:4], fits[-1]]
    raise NegotiationError(
        f"parallel.tensor = {shard.size}: {what} of {name!r} cannot be divided among {shard.size} ranks",
        fix=f"set parallel.tensor to a divisor of {count}: {', '.join(map(str, fits))}",
    )


@frozen
class Cut:
    """Which places of a dimension a rank has: those of each section, in order."""

    sections: tuple[Section, ...]

    @classmethod
    def of(cls, *sections: Section) -> Cut:
        """Return the cut of sections behind each other."""
        return cls(sections)

    def index(self, shard: Shard, name: str) -> torch.Tensor:
        """Return the places [n] int64 that a rank has.

        Raises:
            NegotiationError: if a section cannot be divided among the ranks.
        """
        start, pieces = 0, []
        for section in self.sections:
            pieces.append(section.index(shard, name) + start)
            start += section.size
        return torch.cat(pieces)

    @property
    def size(self) -> int:
        """Return the number of all places."""
        return sum(section.size for section in self.sections)


@frozen
class Groups(Cut):
    """Cut of groups, in each of which lie parts behind each other, as queries, key and value of a KV head.

    If there are fewer groups than ranks, the ranks of a group share some of its parts and divide the others.

    Attributes:
        sections: the parts of one group, shared ones with a count of 1 and `repeats`.
        count: number of groups.
    """

    count: int

    def index(self, shard: Shard, name: str) -> torch.Tensor:
        """Return the places [n] int64 that a rank has."""
        width = sum(section.size for section in self.sections)
        if self.count % shard.size == 0:
            return Section(self.count, width).index(shard, name)
        share(Section(self.count, width, repeats=True), shard, name)
        ranks = shard.size // self.count  # of one group
        group, inner = divmod(shard.rank, ranks)
        return Cut(self.sections).index(Shard(rank=inner, size=ranks), name) + group * width

    @property
    def size(self) -> int:
        """Return the number of all places."""
        return self.count * sum(section.size for section in self.sections)


def plain(size: int) -> Cut:
    """Return the cut of numbers that belong to nothing in particular."""
    return Cut.of(Section(size))


def halves(size: int, parts: int = 2) -> Cut:
    """Return the cut of several things of one size behind each other."""
    return Cut((Section(size // parts),) * parts)


def cut_tensor(module: nn.Module, name: str, dim: int, cut: Cut, shard: Shard, title: str) -> None:
    """Replace a parameter or buffer of a module by a rank's part of it."""
    whole = getattr(module, name)
    index = cut.index(shard, title)
    part = whole.detach().index_select(dim % whole.dim(), index.to(whole.device)).contiguous()
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(part, requires_grad=False)
    else:
        module._buffers[name] = part
    note(module, name, Taken(dim % whole.dim(), index, whole.shape[dim]))


def is_linear(module: Any) -> bool:
    """Return True for a layer that `cut_outputs` and `cut_inputs` take."""
    return type(module) in (nn.Linear, Conv1D)


def sizes_of(linear: Any) -> tuple[int, int]:
    """Return the numbers of inputs and of outputs of a linear layer."""
    rows, columns = linear.weight.shape
    return (rows, columns) if type(linear) is Conv1D else (columns, rows)


def cut_outputs(linear: Any, cut: Cut, shard: Shard, title: str) -> None:
    """Give a rank its outputs of a linear layer."""
    cut_tensor(linear, "weight", 1 if type(linear) is Conv1D else 0, cut, shard, title)
    if linear.bias is not None:
        cut_tensor(linear, "bias", 0, cut, shard, title)
    _resize(linear)


def cut_inputs(linear: Any, cut: Cut, shard: Shard, title: str) -> None:
    """Give a rank its inputs of a linear layer. The bias is added by rank 0 alone."""
    cut_tensor(linear, "weight", 0 if type(linear) is Conv1D else 1, cut, shard, title)
    if linear.bias is not None:
        only_first(linear, "bias", shard)
    _resize(linear)


def only_first(module: nn.Module, name: str, shard: Shard) -> None:
    """Let a parameter count on rank 0 alone: zeros replace it elsewhere."""
    if shard.rank > 0:
        module._parameters[name] = nn.Parameter(torch.zeros_like(getattr(module, name)), requires_grad=False)


def _resize(linear: Any) -> None:
    inputs, outputs = sizes_of(linear)
    if type(linear) is Conv1D:
        linear.nx, linear.nf = inputs, outputs
    else:
        linear.in_features, linear.out_features = inputs, outputs


def rescale(module: Any, changes: Sequence[tuple[Sequence[str], int, int]]) -> None:
    """Change attributes of a module that count what was divided.

    Args:
        changes: names of attributes, their value if they count it, and the value on a rank.
    """
    for names, whole, own in changes:
        for name in names:
            if module.__dict__.get(name) == whole and not isinstance(module.__dict__[name], bool):
                setattr(module, name, own)
