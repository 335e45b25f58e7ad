"""Expert placement that exchanges experts between the busiest and the idlest rank for as long as that helps."""

from __future__ import annotations

from typing import Any

import numpy as np

from slotline.registry.capability import Flag
from slotline.registry.contracts import ExpertPlacementCapabilities, ExpertPlacementContext
from slotline.registry.descriptor import Descriptor, Kind

Array = np.ndarray[Any, Any]


class Exchanges:
    """Placement that begins with the even one."""

    def __init__(self, context: ExpertPlacementContext) -> None:
        self.ranks, self.redundant = context.ranks, context.redundant

    def place(self, loads: Array) -> Array:
        return np.stack([self.layer(layer) for layer in loads])

    def layer(self, loads: Array) -> Array:
        """Return the placement of one layer."""
        placed = np.arange(len(loads) + self.redundant) % len(loads)
        shares = (loads / np.bincount(placed))[placed]
        for _ in range(100):
            pair = self.helpful(shares)
            if pair is None:
                break
            for one in (placed, shares):
                one[list(pair)] = one[[pair[1], pair[0]]]
        return placed

    def helpful(self, shares: Array) -> tuple[int, int] | None:
        """Return a slot of the busiest and one of the idlest rank to exchange, or None."""
        parts = shares.reshape(self.ranks, -1)
        sums = parts.sum(1)
        high, low = int(sums.argmax()), int(sums.argmin())
        gap = sums[high] - sums[low]
        gains = parts[high][:, None] - parts[low][None, :]  # each of them changes the gap by twice itself
        rest = np.abs(gap - 2 * gains)
        one, other = np.unravel_index(rest.argmin(), rest.shape)
        if not rest[one, other] < gap * (1 - 1e-9):
            return None
        size = parts.shape[1]
        return high * size + int(one), low * size + int(other)


class Even(Exchanges):
    """Placement that no load changes."""

    def layer(self, loads: Array) -> Array:
        return np.arange(len(loads) + self.redundant) % len(loads)


descriptor = Descriptor(
    kind=Kind.EXPERT_PLACEMENT,
    name="exchanges",
    capabilities=ExpertPlacementCapabilities(redundant=Flag(True)),
    factory=Exchanges,
    summary="exchanges experts of the busiest rank",
)

even = Descriptor(
    kind=Kind.EXPERT_PLACEMENT,
    name="even",
    capabilities=ExpertPlacementCapabilities(),
    factory=Even,
    summary="as many experts on each rank, whatever they have to do",
)
