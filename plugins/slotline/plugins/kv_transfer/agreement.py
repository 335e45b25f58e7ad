"""Agreement of ranks on blocks: they schedule alike, so all of them must know the same of every block."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attrs import define, field

from slotline.ranks.replicas.reports import BlockCounts

Flags = npt.NDArray[np.bool_]
EVENT_BYTES = 2048
"""Bytes of a rank's events on their way to the others."""


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

    def held(self, own: Sequence[bool], events: Callable[[], Mapping[str, float]] = dict) -> Flags:
        """Return which blocks are held by all ranks, [n] bool.

        Args:
            own: [n], those that this rank holds.
            events: gives the numbers of this rank's events, by name. Several ranks tell each other.
        """
        if self.size > 1:
            flags = np.packbits(np.array(own, np.bool_)).tobytes()
            told = self.gather(flags + _packed(events()))
            found = _flags([one[: len(flags)] for one in told], len(own))
            self.counts = self.counts._replace(events=tuple(json.loads(one[len(flags) :]) for one in told))
        else:
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
    ) -> tuple[Sequence[bool], Sequence[bool], Sequence[bool], bool]:
        """Return which loads have ended on all ranks, which of those failed on any, and which others are late on any.

        Each has n. The last value is whether the first rank finds the store slow.

        Args:
            own: [n], those that have ended on this rank.
            failed: [n], those of them that failed here.
            late: [n], those that have taken too long here.
            slow: whether this rank finds the store slow.
        """
        number = len(own)
        if self.size == 1:  # in every step with loads: arrays would take longer than what they hold
            lost_here = [bad and is_over for bad, is_over in zip(failed, own, strict=True)]
            counts, lost_now = self.counts, sum(lost_here)
            self.counts = counts._replace(lost=counts.lost + lost_now, failed=(counts.failed[0] + lost_now,))
            return own, lost_here, [is_late and not o for is_late, o in zip(late, own, strict=True)], slow
        found = self._of_all([*own, *failed, *late, slow])
        done, failures, overdue = (found[:, first : first + number] for first in (0, number, 2 * number))
        ended: Flags = np.logical_and.reduce(done)
        bad = failures & ended
        lost: Flags = np.logical_or.reduce(bad)
        waiting: Flags = np.logical_or.reduce(overdue) & ~ended
        counts = self.counts
        self.counts = counts._replace(lost=counts.lost + int(lost.sum()), failed=_added(counts.failed, bad))
        return ended.tolist(), lost.tolist(), waiting.tolist(), bool(found[0, -1])

    def everywhere(self, own: Sequence[bool]) -> Flags:
        """Return what is true of all ranks, [n] bool.

        Args:
            own: [n], what is true of this one.
        """
        found: Flags = np.logical_and.reduce(self._of_all(own))
        return found

    def count_loads(self, number: int) -> None:
        """Count loads that were started."""
        self.counts = self.counts._replace(loads=self.counts.loads + number)

    def _of_all(self, own: Sequence[bool]) -> Flags:
        """Return the flags of all ranks, [size, n]."""
        flags = np.array(own, np.bool_)
        if self.size == 1:
            return flags[None]
        return _flags(self.gather(np.packbits(flags).tobytes()), len(own))


def _flags(packed: Sequence[bytes], number: int) -> Flags:
    """Return flags that were packed, [ranks, number]."""
    return np.stack([np.unpackbits(np.frombuffer(one, np.uint8), count=number) for one in packed]).astype(bool)


def _packed(events: Mapping[str, float]) -> bytes:
    """Return numbers by name as JSON of EVENT_BYTES, those that it has room for."""
    texts, left = list[str](), EVENT_BYTES - 2
    for name, value in events.items():
        text = f"{json.dumps(name)}:{json.dumps(value)}"
        if (left := left - len(text) - 1) < 0:
            break
        texts.append(text)
    return f"{{{','.join(texts)}}}".encode().ljust(EVENT_BYTES)


def _added(counts: tuple[int, ...], found: Flags) -> tuple[int, ...]:
    """Return the counts of each rank with those of `found` [size, n]."""
    return tuple(before + int(new) for before, new in zip(counts, found.sum(1), strict=True))
