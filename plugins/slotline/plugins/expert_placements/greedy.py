"""Greedy placement: the expert with most tokens first, each to the rank that has least."""

from __future__ import annotations

from typing import Any

import numpy as np

from slotline.registry.contracts.expert_placement import ExpertPlacementContext

Array = np.ndarray[Any, Any]


class Greedy:
    """Placement of each layer by itself. See `slotline.registry.contracts.expert_placement.ExpertPlacement`."""

    def __init__(self, context: ExpertPlacementContext) -> None:
        self._ranks, self._redundant = context.ranks, context.redundant

    def place(self, loads: Array) -> Array:
        """See `ExpertPlacement.place`."""
        return np.stack([self._layer(layer) for layer in loads])

    def _layer(self, loads: Array) -> Array:
        slots = len(loads) + self._redundant
        even = np.arange(slots) % len(loads)
        packed = self._packed(loads, _copies(loads, self._redundant, self._ranks))
        return min(packed, even, key=lambda placement: most(loads, placement, self._ranks))

    def _packed(self, loads: Array, copies: Array) -> Array:
        """Return the expert of each slot. No rank gets an expert twice unless only such slots are left."""
        room = np.full(self._ranks, copies.sum() // self._ranks)
        given, has = np.zeros(self._ranks), np.zeros((self._ranks, len(loads)), dtype=bool)
        slots: list[list[int]] = [[] for _ in range(self._ranks)]
        shares = loads / copies
        for expert in np.repeat(np.arange(len(loads)), copies)[np.argsort(-np.repeat(shares, copies), kind="stable")]:
            rank = min(np.flatnonzero(room), key=lambda one: (has[one, expert], given[one], one))
            slots[rank].append(int(expert))
            room[rank] -= 1
            given[rank] += shares[expert]
            has[rank, expert] = True
        return np.array(slots).reshape(-1)


def most(loads: Array, placement: Array, ranks: int) -> float:
    """Return the most tokens of a rank.

    Args:
        loads: [experts].
        placement: the expert of each slot, [slots] int64.
    """
    shares = loads / np.maximum(np.bincount(placement, minlength=len(loads)), 1)
    return float(shares[placement].reshape(ranks, -1).sum(1).max())


def _copies(loads: Array, redundant: int, ranks: int) -> Array:
    """Return the number of copies of each expert [experts], at most one for each rank."""
    copies = np.ones(len(loads), dtype=np.int64)
    for _ in range(redundant):
        copies[np.argmax(np.where(copies < ranks, loads / copies, -1.0))] += 1
    return copies
