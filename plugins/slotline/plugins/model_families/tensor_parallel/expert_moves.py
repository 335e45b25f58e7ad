"""Moves of experts among ranks, between steps: into the same addresses, so that captured graphs stay valid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import nn

from slotline.plugins.model_families.tensor_parallel.expert_parallel import WEIGHTS, place
from slotline.registry.contracts.communicator import Communicator

PIECE = 1 << 26
"""Most bytes that a rank sends and receives at once, if a row of all its experts is not larger."""


class SharedMixtures:
    """Mixtures of a loaded model whose experts the ranks share, in order. See `MixtureModel`."""

    def __init__(self, hf_model: nn.Module, communicator: Communicator) -> None:
        self._modules: list[Any] = [one for one in hf_model.modules() if hasattr(one, "slotline_placement")]
        self._communicator = communicator

    def loads(self) -> list[torch.Tensor]:
        """Return the tokens of each expert since the last call over all ranks, [experts] int64 for each mixture."""
        found = [module.slotline_loads.clone() for module in self._modules]
        for module in self._modules:
            module.slotline_loads.zero_()
        if all(module.forward.same_tokens for module in self._modules):
            return found
        whole = self._communicator.all_reduce(torch.cat(found).float())
        return list(whole.long().split([len(one) for one in found]))

    def placements(self) -> list[np.ndarray[Any, Any]]:
        """Return the expert of each slot, [slots] int64 for each mixture."""
        return [module.slotline_placement.cpu().numpy() for module in self._modules]

    def place(self, placements: Sequence[np.ndarray[Any, Any]]) -> int:
        """Move the experts to their places. Return the number of experts that came from other ranks to this one."""
        came = 0
        for module, old, new in zip(self._modules, self.placements(), placements, strict=True):
            rank, ranks = self._communicator.rank, self._communicator.size
            moves = Moves.between(list(old.reshape(ranks, -1)), new, rank, ranks)
            if not moves.any:
                continue
            with torch.no_grad():
                for name in WEIGHTS:
                    if (weight := module._parameters.get(name)) is not None:
                        move(weight, weight, moves, self._communicator, len(weight))
                place(module, new, rank)
            came += moves.came
        return came


@frozen(kw_only=True)
class Moves:
    """What one rank sends and receives to change the placement of a mixture.

    Attributes:
        given: the slots of this rank whose experts go, in order of the ranks that get them.
        sent: number of experts for each rank, itself included.
        filled: the slots of this rank that experts come to, in order of the ranks that give them.
        received: number of experts from each rank.
        any: whether any rank gets an expert.
        came: experts from other ranks.
    """

    given: tuple[int, ...]
    sent: tuple[int, ...]
    filled: tuple[int, ...]
    received: tuple[int, ...]
    any: bool
    came: int

    @classmethod
    def between(
        cls,
        held: Sequence[np.ndarray[Any, Any]],
        placement: np.ndarray[Any, Any],
        rank: int,
        ranks: int,
        *,
        kept: bool = True,
    ) -> Moves:
        """Return the moves of a rank. A slot gets its expert from its own rank if that has it, else from any in turn.

        Args:
            held: the experts in the slots of each rank before, [slots] int64. They may be none.
            placement: the expert of each slot of all ranks after, [slots] int64.
            ranks: number of ranks after, which are the first ones.
            kept: whether the memory of the slots is the same, so that what is in its place need not move.
        """
        slots, size = len(placement) // ranks, len(held)
        holders: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for source, experts in enumerate(held):
            for at, expert in enumerate(experts.tolist()):
                holders[expert].append((source, at))
        given: list[list[int]] = [[] for _ in range(size)]
        filled: list[list[int]] = [[] for _ in range(size)]
        moves = False
        for slot, expert in enumerate(placement.tolist()):
            to, at = divmod(slot, slots)
            near = [one for one in holders[expert] if one[0] == to]
            if (to, at) in near and kept:
                continue
            moves = True
            source, there = near[0] if near else holders[expert][slot % len(holders[expert])]
            if source == rank:
                given[to].append(there)
            if to == rank:
                filled[source].append(at)
        received = tuple(map(len, filled))
        return cls(
            given=tuple(chain.from_iterable(given)),
            sent=tuple(map(len, given)),
            filled=tuple(chain.from_iterable(filled)),
            received=received,
            any=moves,
            came=sum(received) - received[rank],
        )


def move(weight: torch.Tensor, room: torch.Tensor, moves: Moves, communicator: Communicator, most: int) -> None:
    """Move weights piece by piece: some rows of all experts that go, so that a slot is read before it is written.

    Args:
        weight: [slots before, rows, ...].
        room: [slots after, rows, ...], which may be the same memory.
        most: most slots of a rank, so that all ranks cut alike.
    """
    given, filled = (torch.tensor(s, dtype=torch.int64, device=weight.device) for s in (moves.given, moves.filled))
    row = max(most * weight[0, :1].numel() * weight.element_size(), 1)
    count = max(PIECE // row, 1)
    for piece, into in zip(weight.split(count, 1), room.split(count, 1), strict=True):
        came = communicator.all_to_all(piece.index_select(0, given), moves.sent, moves.received).finish()
        if len(came):
            into.index_copy_(0, filled, came)
