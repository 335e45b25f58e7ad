"""Choice of a replica for each request, by the prefixes that each has computed and by its load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK = 64
"""Tokens of a prefix that are compared at a time."""
WORTH = 1
"""Load that a replica may have beyond the least loaded for each token of a prefix that it has computed."""


class Router:
    """Router of requests to replicas.

    A request goes to the replica that has computed most of its prefix, unless that one's load is too far above the
    least: by more than what the prefix is worth, or by more than a margin. Otherwise it goes to the least loaded. Of
    equals the one with the lowest number is taken.

    Args:
        replicas: their number.
        margin: load that a replica may have beyond the least loaded, whatever it has computed.
        remembered: blocks of `BLOCK` tokens that are remembered of each replica at most, the latest. 0 without prefix
            caching.

    Attributes:
        loads: of the unfinished requests of each replica, in tokens of outputs.
        chosen_among: number of the replicas that take requests, which are the first. The others finish theirs.
    """

    def __init__(self, replicas: int, *, margin: int, remembered: int) -> None:
        self.loads: list[int] = []
        self._margin, self._remembered = margin, remembered
        self._blocks: list[OrderedDict[int, None]] = []
        self.choose_among(replicas)

    def choose_among(self, replicas: int) -> None:
        """Let the first so many replicas take requests. There may be more of them than before."""
        self.chosen_among = replicas
        while len(self.loads) < replicas:
            self.loads.append(0)
            self._blocks.append(OrderedDict())

    def remove_last(self) -> None:
        """Forget the last replica, which takes no requests."""
        self.loads.pop()
        self._blocks.pop()

    def route(self, tokens: npt.NDArray[np.int64], weight: int, key: str = "") -> int:
        """Return the replica for a request, and count it there.

        Args:
            tokens: [n] the prompt.
            weight: what it adds to the load, until `ended`.
            key: requests share prefixes only with equal keys.
        """
        hashes = _hashes(tokens, key) if self._remembered else []
        loads, open_blocks = self.loads[: self.chosen_among], self._blocks[: self.chosen_among]
        computed = [_leading(hashes, blocks) * BLOCK for blocks in open_blocks]
        least = min(loads)
        near = [i for i, load in enumerate(loads) if load - least <= min(self._margin, WORTH * computed[i])]
        chosen = max(near, key=lambda i: (computed[i], -self.loads[i], -i))
        self.assign(chosen, weight)
        if self._remembered:
            self._remember(self._blocks[chosen], hashes)
        return chosen

    def assign(self, replica: int, weight: int) -> None:
        """Count a request that goes to a replica for another reason."""
        self.loads[replica] += weight

    def ended(self, replica: int, weight: int) -> None:
        """Take a request that has ended off the load of its replica."""
        self.loads[replica] -= weight

    def forget(self) -> None:
        """Forget all prefixes, since the replicas have."""
        for blocks in self._blocks:
            blocks.clear()

    def _remember(self, blocks: OrderedDict[int, None], hashes: Sequence[int]) -> None:
        for one in reversed(hashes):  # the first blocks of a prefix are forgotten last
            blocks[one] = None
            blocks.move_to_end(one)
        while len(blocks) > self._remembered:
            blocks.popitem(last=False)


def _hashes(tokens: npt.NDArray[np.int64], key: str) -> list[int]:
    """Return a hash of each prefix of full blocks, the shortest first."""
    data, size, found = tokens.tobytes(), BLOCK * tokens.itemsize, list[int]()
    last = hash(key)
    for start in range(0, len(data) - size + 1, size):
        last = hash((last, data[start : start + size]))
        found.append(last)
    return found


def _leading(hashes: Sequence[int], blocks: OrderedDict[int, None]) -> int:
    """Return the number of leading hashes that are among the blocks."""
    for count, one in enumerate(hashes):
        if one not in blocks:
            return count
    return len(hashes)
