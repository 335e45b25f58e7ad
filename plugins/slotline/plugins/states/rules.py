"""Checkpoint rules of one cache spec of states, or of several together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slotline.registry.contracts import BlockHash, StateSpec

Int = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class StateRules(Protocol):
    """The part of `StateSpec` that decides on checkpoints."""

    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        """Return the position at which a step ends each request's tokens."""
        ...

    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        """Return a mask of the states to keep at `computed` tokens."""
        ...

    def prefix_hit(self, hashes: Sequence[BlockHash], is_kept: Callable[[BlockHash], bool]) -> int:
        """Return the longest prefix from which a request can resume, in units."""
        ...

    def rolls_back(self, counts: Int, accepted: Int) -> Mask:
        """Return a mask of the states that must be rolled back after a step."""
        ...


def rules_of(specs: Sequence[StateSpec]) -> StateRules:
    """Return the rules of the specs that hold a model's states."""
    return specs[0] if len(specs) == 1 else JointRules(specs)


class JointRules:
    """Rules of several specs. A checkpoint holds the states of all layers, so each spec's wishes apply to all."""

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self._specs = tuple(specs)

    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        """Return the earliest position that any spec chooses."""
        return reduce(np.minimum, (spec.stops(computed, ends, last, branch) for spec in self._specs))

    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        """Return a mask of the states that any spec keeps."""
        return reduce(np.logical_or, (spec.keeps(computed, last, branch) for spec in self._specs))

    def prefix_hit(self, hashes: Sequence[BlockHash], is_kept: Callable[[BlockHash], bool]) -> int:
        """Return the longest prefix from which all specs can resume, in units."""
        length = len(hashes)
        while True:  # a spec may choose another prefix once it is shorter: repeat until all agree
            agreed = min(spec.prefix_hit(hashes[:length], is_kept) for spec in self._specs)
            if agreed == length:
                return length
            length = agreed

    def rolls_back(self, counts: Int, accepted: Int) -> Mask:
        """Return a mask of the states that any spec rolls back."""
        return reduce(np.logical_or, (spec.rolls_back(counts, accepted) for spec in self._specs))
