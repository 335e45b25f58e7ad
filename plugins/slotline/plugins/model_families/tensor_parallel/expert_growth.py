"""Change of the ranks that share experts, between steps: how many there are, and how many experts each has.

Weights go from ranks that have them to those that need them. A rank that gets fewer slots keeps the memory of the
others, so that addresses stay, and so they do when it gets them back. For more slots than it ever had it takes new
memory. A captured graph does not outlive the change in any case: it holds the old group, and the old number of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slotline.plugins.model_families.tensor_parallel.expert_moves import Moves, SharedMixtures, move
from slotline.plugins.model_families.tensor_parallel.expert_parallel import (
    LOADS,
    LOCAL,
    PLACEMENT,
    PLACES,
    WEIGHTS,
    place,
    places_of,
)
from slotline.registry.contracts.communicator import Communicator
from slotline.registry.errors import ModelError

Array = np.ndarray[Any, Any]
_ROOM = "slotline_room"


class GrowingMixtures(SharedMixtures):
    """Mixtures of a loaded model whose experts another number of ranks may share."""

    def resize(self, held: Sequence[Sequence[Array]], placements: Sequence[Array], ranks: int) -> int:
        """Give each rank its slots of placements over another number of ranks. See `resize`.

        Args:
            held: the experts in the slots of each rank, [slots] int64 for each mixture.
            placements: the expert of each slot, [slots] int64 for each mixture.

        Raises:
            ModelError: if experts cannot move, or the ranks divide more than experts. Nothing has changed then.
        """
        if any(module.forward.same_tokens for module in self._modules):
            raise ModelError(
                "the ranks of a tensor group divide more than experts", fix="build the engine again with other ranks"
            )
        for module in self._modules:
            refuse_packed(module)
        each = zip(self._modules, held, placements, strict=True)
        came = sum(resize(module, self._communicator, own, new, ranks) for module, own, new in each)
        self.join(self._communicator)
        return came

    def join(self, communicator: Communicator) -> None:
        """Share the experts with the ranks of another communicator."""
        self._communicator = communicator
        for module in self._modules:
            module.forward.join(communicator)


def resize(module: Any, communicator: Communicator, held: Sequence[Array], placement: Array, ranks: int) -> int:
    """Give a mixture of each rank its slots of a placement over another number of ranks. All ranks call it.

    Args:
        communicator: over the ranks before and after.
        held: the experts in the slots of each of its ranks, [slots] int64. They may be none.
        placement: the expert of each slot of all ranks after, [slots] int64.
        ranks: number of ranks after, which are the first ones. The others give what is needed, and keep nothing.

    Returns:
        number of experts that came from other ranks to this one.
    """
    rank, slots = communicator.rank, len(placement) // ranks
    stays, most = rank < ranks, max(slots, *map(len, held))
    rooms = {name: _room(module, name, slots) for name in WEIGHTS if module._parameters.get(name) is not None}
    kept = all(room.data_ptr() == module._parameters[name].data_ptr() for name, room in rooms.items())
    moves = Moves.between(held, placement, rank, ranks, kept=kept)
    with torch.no_grad():
        for name, room in rooms.items():
            weight = module._parameters[name]
            move(weight.data, room, moves, communicator, most)
            if stays:
                weight.data = room
        if stays:
            _write(module, placement, rank, slots)
    return moves.came


def refuse_packed(module: Any) -> None:
    """Refuse experts whose weights are not plain tensors.

    Raises:
        ModelError: naming the class.
    """
    if module._parameters.get("down_proj") is None:
        raise ModelError(
            f"the experts of {type(module).__name__} are packed by a plugin, and do not move",
            fix="build the engine again with another number of ranks",
        )


def _room(module: Any, name: str, slots: int) -> torch.Tensor:
    """Return memory for so many slots of a weight: that which it has or had, if there is enough."""
    rooms = module.__dict__.setdefault(_ROOM, {})
    room: torch.Tensor = rooms.setdefault(name, module._parameters[name].data)
    if len(room) < slots:
        room = rooms[name] = room.new_empty(slots, *room.shape[1:])
    return room[:slots]


def _write(module: Any, placement: Array, rank: int, slots: int) -> None:
    """Let the tables of a mixture say where its experts are. Their addresses stay if their sizes do."""
    shape = places_of(placement, module.slotline_places.shape[0]).shape
    for name, wanted in ((PLACEMENT, placement.shape), (PLACES, shape), (LOCAL, shape)):
        table = module._buffers[name]
        if table.shape != wanted:
            table.data = table.new_zeros(wanted)
    module.num_experts = slots
    place(module, placement, rank)
    if LOADS in module._buffers:
        module._buffers[LOADS].zero_()
