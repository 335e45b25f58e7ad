"""Choice of a replica for each request, by the prefixes that each holds and by its load."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slotline.ranks.replicas.reports import PrefixNews

BLOCK = 64
"""Tokens of a prefix that are compared at a time."""
WORTH = 1
"""Load that a replica may have beyond the least loaded for each token of a prefix that it has computed."""


class Router:
    """Router of requests to replicas.

    A request goes to the replica that holds most of its prefix, unless that one's load is too far above the least: by
    more than what the prefix is worth, or by more than a margin. Otherwise it goes to the least loaded. Of equals the
    one with the lowest number is taken.

    A replica holds the prefixes that it told of, and those that its unfinished requests compute. A request whose
    prefixes have no names here is compared with the prompts that were sent, which a replica may have given up.

    Args:
        replicas: their number.
        margin: load that a replica may have beyond the least loaded, whatever it has computed.
        remembered: blocks of `BLOCK` tokens that are remembered of each replica at most, the latest. 0 without prefix
            caching.

    Attributes:
        loads: of the unfinished requests of each replica, in tokens of outputs.
        chosen_among: number of the replicas that take requests, which are the first. The others finish theirs.
        held: names of the prefixes that each replica has told of.
    """

    def __init__(self, replicas: int, *, margin: int, remembered: int) -> None:
        self.loads: list[int] = []
        self._margin, self._remembered = margin, remembered
        self.held: list[set[bytes]] = []
        self._coming: list[Counter[bytes]] = []  # of unfinished requests
        self._blocks: list[OrderedDict[int, None]] = []
        self.choose_among(replicas)

    def choose_among(self, replicas: int) -> None:
        """Let the first so many replicas take requests. There may be more of them than before."""
        self.chosen_among = replicas
        while len(self.loads) < replicas:
            self.loads.append(0)
            self.held.append(set())
            self._coming.append(Counter())
            self._blocks.append(OrderedDict())

    def remove_last(self) -> None:
        """Forget the last replica, which takes no requests."""
        self.loads.pop()
        for each in (self.held, self._coming, self._blocks):
            each.pop()

    def route(self, tokens: npt.NDArray[np.int64], weight: int, key: str = "") -> int:
        """Return the replica for a request, by the prompts that were sent, and count it there.

        Args:
            tokens: [n] the prompt.
            weight: what it adds to the load, until `ended`.
            key: requests share prefixes only with equal keys.
        """
        hashes = _hashes(tokens, key) if self._remembered else []
        chosen = self._choose([_leading(hashes, blocks) * BLOCK for blocks in self._blocks[: self.chosen_among]])
        self.assign(chosen, weight)
        if self._remembered:
            self._remember(self._blocks[chosen], hashes)
        return chosen

    def route_held(self, names: Sequence[bytes], size: int, weight: int) -> int:
        """Return the replica for a request, by what the replicas hold, and count it there.

        Args:
            names: of its prefixes of 1, 2, ... blocks.
            size: tokens of a block.
            weight: what it adds to the load, until `ended` with the same names.
        """
        known = zip(self.held[: self.chosen_among], self._coming, strict=False)
        chosen = self._choose([_leading(names, held, coming) * size for held, coming in known])
        self.assign(chosen, weight)
        self._coming[chosen].update(names)
        return chosen

    def learn(self, replica: int, news: PrefixNews) -> None:
        """Take what a replica tells of its prefixes. One that has left is not heard."""
        if replica >= len(self.held):
            return
        held = self.held[replica]
        if news.cleared:
            held.clear()
        held.difference_update(news.removed_names)
        held.update(news.stored_names)

    def assign(self, replica: int, weight: int) -> None:
        """Count a request that goes to a replica for another reason."""
        self.loads[replica] += weight

    def ended(self, replica: int, weight: int, names: Sequence[bytes] = ()) -> None:
        """Take a request that has ended off the load of its replica, and the names that it was routed by."""
        self.loads[replica] -= weight
        coming = self._coming[replica]
        for one in names:
            coming[one] -= 1
            if not coming[one]:
                del coming[one]

    def forget(self) -> None:
        """Forget all prefixes, since the replicas have."""
        for blocks, held in zip(self._blocks, self.held, strict=True):
            blocks.clear()
            held.clear()

    def _choose(self, computed: Sequence[int]) -> int:
        """Return the replica for a request of whose prefix each of them has so many tokens."""
        loads = self.loads[: self.chosen_among]
        least = min(loads)
        near = [i for i, load in enumerate(loads) if load - least <= min(self._margin, WORTH * computed[i])]
        return max(near, key=lambda i: (computed[i], -loads[i], -i))

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


def _leading(hashes: Sequence[Any], *known: Collection[Any]) -> int:
    """Return the number of leading hashes that are in one of the collections."""
    for count, one in enumerate(hashes):
        if not any(one in each for each in known):
            return count
    return len(hashes)
