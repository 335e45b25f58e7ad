"""RMS norms over numbers of which each rank has a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slotline.plugins.model_families.tensor_parallel.pieces import Cut
from slotline.plugins.model_families.tensor_parallel.work import UnknownPartError, Work
from slotline.registry.contracts.communicator import Communicator

EPSILONS = ("variance_epsilon", "eps")


class JoinedNorm(nn.Module):
    """RMS norm of a row that the ranks have together, gated or not. They add up their sums of squares.

    Attributes:
        weight: [n], a rank's part.
        communicator: of the tensor group. None while the model is only looked at.
        group: numbers of the whole row that are normed together.
        shared: number of ranks with the same part.
        gate_first: whether a gate is multiplied before the norm.
    """

    def __init__(self, weight: nn.Parameter, eps: float, group: int, shared: int, *, gate_first: bool) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon, self.group, self.shared, self.gate_first = eps, group, shared, gate_first
        self.communicator: Communicator | None = None

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Map [.., n] to [.., n]."""
        x = hidden_states.float()
        if gate is not None and self.gate_first:
            x = x * functional.silu(gate.float())
        mean = self._sum(x.square().sum(-1, keepdim=True)) / self.group  # [.., 1]
        x = x * torch.rsqrt(mean + self.epsilon) * self.weight.float()
        if gate is not None and not self.gate_first:
            x = x * functional.silu(gate.float())
        return x.to(hidden_states.dtype)

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum [.., 1] over the ranks that have the rest of the group."""
        if self.communicator is None:
            return own
        size, shared = self.communicator.size, self.shared
        members = self.group // self.weight.numel()  # different parts of a group
        if members * shared == size and shared == 1:
            return self.communicator.all_reduce(own.contiguous())
        parts = self.communicator.all_gather(own.contiguous(), -1)[..., ::shared]  # [.., different parts]
        first = self.communicator.rank // shared // members * members
        return parts[..., first : first + members].sum(-1, keepdim=True)


def join(work: Work, name: str, parent: nn.Module, child: str, cut: Cut, group: int | None = None) -> None:
    """Divide an RMS norm of all numbers that a cut divides.

    Args:
        group: numbers that are normed together, by default all.

    Raises:
        UnknownPartError: if it is no such norm.
    """
    norm: Any = parent._modules[child]
    eps = check(norm, child, cut)
    work.tensor(f"{name}.{child}", norm, "weight", cut)
    group = group or cut.size
    own = norm.weight.numel()
    if own % group == 0:
        _count_groups(norm, own // group)
        return
    first = not getattr(norm, "norm_before_gate", type(norm).__name__.startswith(GATED_LAST))
    shared = max(1, own * work.shard.size // cut.size)
    setattr(parent, child, JoinedNorm(norm.weight, eps, group, shared, gate_first=first))
    work.joined.joining.append(f"{name}.{child}")


def check(norm: Any, child: str, cut: Cut) -> float:
    """Return the epsilon of an RMS norm of all numbers that a cut divides.

    Raises:
        UnknownPartError: if it is no such norm.
    """
    eps: float | None = next(
        (getattr(norm, one) for one in EPSILONS if isinstance(getattr(norm, one, None), float)), None
    )
    weight = norm._parameters.get("weight")
    if eps is None or weight is None or weight.numel() != cut.size or "RMSNorm" not in type(norm).__name__:
        raise UnknownPartError(f"its {child} is one of all heads")
    return float(eps)


GATED_LAST = ("Qwen3", "OlmoHybrid")
"""Beginnings of the names of gated norms whose gate is multiplied after the norm."""


def _count_groups(norm: Any, groups: int) -> None:
    if hasattr(norm, "n_groups"):
        norm.n_groups = groups


Find = Callable[[str], nn.Module]


def connect(find: Find, names: list[str], communicator: Communicator) -> None:
    """Give the norms their communicator."""
    for name in names:
        norm: Any = find(name)
        norm.communicator = communicator
