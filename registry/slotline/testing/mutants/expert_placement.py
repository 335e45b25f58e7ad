"""Broken expert placements, one bug each, and right ones that differ."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from slotline.registry.contracts import ExpertPlacementContext
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference import expert_placement as reference
from slotline.testing.reference.expert_placement import Array, Exchanges


class LeavesOneOut(Exchanges):
    def layer(self, loads: Array) -> Array:
        placed = super().layer(loads)
        return np.where(placed == np.argmin(loads), np.argmax(loads), placed)


class NoCopies(Exchanges):
    def layer(self, loads: Array) -> Array:
        return super().layer(loads)[: len(loads)]


class RankOfEach(Exchanges):
    def layer(self, loads: Array) -> Array:
        placed = super().layer(loads)
        return np.argsort(placed, kind="stable") // (len(placed) // self.ranks)


class BySize(Exchanges):
    def layer(self, loads: Array) -> Array:
        return together(loads, self.redundant)


class OneForAllLayers(Exchanges):
    def place(self, loads: Array) -> Array:
        return np.tile(self.layer(loads.sum(0)), (len(loads), 1))


class FloatingPlaces(Exchanges):
    def place(self, loads: Array) -> Array:
        return super().place(loads).astype(np.float64)


class OneLayer(Exchanges):
    def place(self, loads: Array) -> Array:
        first: Array = super().place(loads)[0]
        return first


class CopiesUnheard(Exchanges):
    def layer(self, loads: Array) -> Array:
        """Give a copy's whole load to each of its slots, and pack by that."""
        placed = np.arange(len(loads) + self.redundant) % len(loads)
        order = placed[np.argsort(-loads[placed], kind="stable")]
        return order.reshape(-1, self.ranks).T.reshape(-1) if self.redundant else super().layer(loads)


class ByShareOfAll(Exchanges):
    def layer(self, loads: Array) -> Array:
        with np.errstate(invalid="ignore"):
            parts = loads / loads.sum()
        return np.where(np.isnan(parts).any(), 0, super().layer(loads))


class WithinThirtyTwoBits(Exchanges):
    def layer(self, loads: Array) -> Array:
        whole = loads.astype(np.int64) % 2**32
        placed = super().layer(whole.astype(np.float64))
        return placed if loads.max() < 2**32 else together(loads, self.redundant)


class WritesShares(Exchanges):
    def place(self, loads: Array) -> Array:
        found = super().place(loads)
        loads /= np.maximum(loads.sum(1, keepdims=True), 1)
        return found


class Remembers(Exchanges):
    seen: Array | None = None

    def place(self, loads: Array) -> Array:
        if self.seen is None or self.seen.shape != loads.shape[1:]:
            self.seen = np.zeros(loads.shape[1])
        found = super().place(loads + 3 * self.seen * (loads.sum() > 0))
        self.seen = np.abs(self.seen - loads[0]) if len(loads) == 2 else self.seen
        safe = [self.safe(layer, placed) for layer, placed in zip(loads, found, strict=True)]
        return np.stack(safe)

    def safe(self, loads: Array, placed: Array) -> Array:
        """Return a placement, or the even one if that is better."""
        both = (placed, np.arange(len(placed)) % len(loads))
        shares = loads / np.bincount(placed, minlength=len(loads))
        return min(both, key=lambda one: shares[one].reshape(self.ranks, -1).sum(1).max())


class DrawsTies(Exchanges):
    def __init__(self, context: ExpertPlacementContext) -> None:
        super().__init__(context)
        self.random = np.random.default_rng()

    def layer(self, loads: Array) -> Array:
        placed = super().layer(loads).reshape(self.ranks, -1)
        return self.random.permutation(placed, axis=0).reshape(-1)


class TiredAfterAWhile(Exchanges):
    count = 0

    def place(self, loads: Array) -> Array:
        self.count += 1
        found = super().place(loads)
        if self.count > 12:
            found[:, 0] = found[:, -1]
        return found


def together(loads: Array, redundant: int) -> Array:
    """Return a placement that puts the experts with most tokens side by side."""
    order: Array = np.argsort(-loads, kind="stable")
    return order[np.arange(len(loads) + redundant) % len(loads)]


def _mutant(name: str, summary: str, level: Level, factory: Any) -> Mutant:
    changed = attrs.evolve(
        reference.descriptor, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory
    )
    return Mutant(name, summary, level, changed)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("leaves-one-out", "an expert with few tokens has no slot", Level.NUMERICS, LeavesOneOut),
    _mutant("no-copies", "gives no redundant slots", Level.NUMERICS, NoCopies),
    _mutant("rank-of-each", "gives the rank of each expert", Level.NUMERICS, RankOfEach),
    _mutant("by-size", "puts the largest together", Level.NUMERICS, BySize),
    _mutant("one-for-all-layers", "places all layers by their sum", Level.NUMERICS, OneForAllLayers),
    _mutant("floating-places", "numbers experts by floating-point numbers", Level.NUMERICS, FloatingPlaces),
    _mutant("one-layer", "places the first layer alone", Level.NUMERICS, OneLayer),
    _mutant("copies-unheard", "takes each copy for the whole expert", Level.NUMERICS, CopiesUnheard),
    _mutant("share-of-all", "divides by no tokens", Level.HOSTILE, ByShareOfAll),
    _mutant("thirty-two-bits", "counts tokens in 32 bits", Level.HOSTILE, WithinThirtyTwoBits),
    _mutant("writes-shares", "changes the loads", Level.HOSTILE, WritesShares),
    _mutant("remembers", "mixes in what it was asked before", Level.HOSTILE, Remembers),
    _mutant("draws-ties", "gives each rank another answer", Level.NUMERICS, DrawsTies),
    _mutant("tired", "leaves an expert out after a dozen placements", Level.STATEFUL, TiredAfterAWhile),
)

CORRECT: tuple[Correct, ...] = (
    Correct("the busiest rank exchanges experts with the idlest", reference.descriptor),
    Correct("each rank has as many experts, and no copies", reference.even),
)
