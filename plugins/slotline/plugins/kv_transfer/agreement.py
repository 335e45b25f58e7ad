"""Agreement of ranks on blocks: they schedule alike, so all of them must know the same of every block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from attrs import define, field

from slotline.ranks.replicas.reports import BlockCounts

Flags = npt.NDArray[np.bool_]


@define(eq=False)
class Agreement:
    """What the connectors of all ranks have said.

    Every rank asks for the same blocks in the same order, so one small message of each rank is enough. A rank alone
    sends none.

    Attributes:
        gather: gives the bytes of all ranks in order, as many of each.
        size: number of ranks that serve the same requests.
        counts: blocks so far.
    """

    gather: Callable[[bytes], list[bytes]] = lambda value: [value]
    size: int = 1
    counts: BlockCounts = field(init=False)

    def __attrs_post_init__(self) -> None:
        none = (0,) * self.size
        self.counts = BlockCounts(0, 0, 0, none, none)

    def held(self, own: Sequence[bool]) -> Flags:
        """Return which blocks are held by all ranks, [n] bool.

        Args:
            own: [n], those that this rank holds.
        """
        found = self._of_all(own)
        counts = self.counts
        self.counts = counts._replace(asked=counts.asked + len(own), held=_added(counts.held, found))
        everywhere: Flags = np.logical_and.reduce(found)
        return everywhere

    def failed(self, own: Sequence[bool], *, slow: bool = False) -> tuple[Flags, bool]:
        """Return which loads have failed on any rank, [n] bool, and whether the first rank finds the store slow.

        Args:
            own: [n], those that failed on this rank.
            slow: whether this rank finds the store slow.
        """
        found = self._of_all([*own, slow])
        bad = found[:, :-1]
        lost: Flags = np.logical_or.reduce(bad)
        counts = self.counts
        self.counts = counts._replace(lost=counts.lost + int(lost.sum()), failed=_added(counts.failed, bad))
        return lost, bool(found[0, -1])

    def ended(
        self, own: Sequence[bool], failed: Sequence[bool], late: Sequence[bool], *, slow: bool = False
    ) -> tuple[Flags, Flags, Flags, bool]:
        """Return which loads have ended on all ranks, which of those failed on any, and which others are late on any.

        Each is [n] bool. The last value is whether the first rank finds the store slow.

        Args:
            own: [n], those that have ended on this rank.
            failed: [n], those of them that failed here.
            late: [n], those that have taken too long here.
            slow: whether this rank finds the store slow.
        """
        number = len(own)
        found = self._of_all([*own, *failed, *late, slow])
        done, failures, overdue = (found[:, first : first + number] for first in (0, number, 2 * number))
        ended: Flags = np.logical_and.reduce(done)
        bad = failures & ended
        lost: Flags = np.logical_or.reduce(bad)
        waiting: Flags = np.logical_or.reduce(overdue) & ~ended
        counts = self.counts
        self.counts = counts._replace(lost=counts.lost + int(lost.sum()), failed=_added(counts.failed, bad))
        return ended, lost, waiting, bool(found[0, -1])

    def count_loads(self, number: int) -> None:
        """Count loads that were started."""
        self.counts = self.counts._replace(loads=self.counts.loads + number)

    def _of_all(self, own: Sequence[bool]) -> Flags:
        """Return the flags of all ranks, [size, n]."""
        flags = np.array(own, np.bool_)
        if self.size == 1:
            return flags[None]
        packed = self.gather(np.packbits(flags).tobytes())
        return np.stack([np.unpackbits(np.frombuffer(one, np.uint8), count=len(own)) for one in packed]).astype(bool)


def _added(counts: tuple[int, ...], found: Flags) -> tuple[int, ...]:
    """Return the counts of each rank with those of `found` [size, n]."""
    return tuple(before + int(new) for before, new in zip(counts, found.sum(1), strict=True))
