"""Mixtures with loads for an expert placement, and what any placement of them has to hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from slotline.registry.contracts import ExpertPlacement, ExpertPlacementContext
from slotline.testing.check import Case, Failed, Run

Array = np.ndarray[Any, Any]


class Mixtures:
    """Mixtures of one size, and the plugin of one rank.

    Attributes:
        experts: number of experts.
        title: the sizes in words.
    """

    def __init__(self, run: Run, case: Case | None = None) -> None:
        case = run.case if case is None else case
        self.experts, self._ranks, self._redundant = case["experts"], case["ranks"], case["redundant"]
        self.title = f"{self.experts} experts, {self._redundant} redundant slots and {self._ranks} ranks"
        self._random = np.random.default_rng(run.seed)
        context = ExpertPlacementContext(contract=1, ranks=self._ranks, redundant=self._redundant)
        self.plugin: ExpertPlacement = run.subject.build(context)

    def skewed(self, layers: int) -> Array:
        """Return loads [layers, experts] of which a few experts have most."""
        weights = self._random.zipf(1.6, (layers, self.experts)).clip(max=1000)
        return self._random.poisson(weights * 10).astype(np.float64)

    def check(self, loads: Array, what: str) -> Array:
        """Return the plugin's placement of loads.

        Raises:
            Failed: if it is none, or has a rank with more tokens than the one that needs no plugin.
        """
        found = self.plugin.place(loads)
        slots = self.experts + self._redundant
        if not isinstance(found, np.ndarray) or found.dtype != np.int64 or found.shape != (len(loads), slots):
            given = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
            raise Failed(f"{what}: place returned {given}, expected int64 ({len(loads)}, {slots})")
        for number, (layer, placed) in enumerate(zip(loads, found, strict=True)):
            where = f"{what}: layer {number}, {self.title}"
            if placed.min() < 0 or placed.max() >= self.experts:
                raise Failed(f"{where}: experts {placed.tolist()}, of 0 .. {self.experts - 1}")
            if len(missing := np.setdiff1d(np.arange(self.experts), placed)):
                raise Failed(f"{where}: experts {missing.tolist()} have no slot")
            most, even = (self._busiest(layer, one) for one in (placed, np.arange(slots) % self.experts))
            if most > even * (1 + 1e-12):
                raise Failed(f"{where}: a rank has {most:g} tokens, and {even:g} if slot s holds s % {self.experts}")
        return found

    def expect(self, holds: bool, what: str) -> None:
        """Raise `Failed` unless something holds."""
        if not holds:
            raise Failed(f"{what} ({self.title})")

    def _busiest(self, loads: Array, placed: Array) -> float:
        shares = loads / np.bincount(placed, minlength=self.experts)
        return float(shares[placed].reshape(self._ranks, -1).sum(1).max())
