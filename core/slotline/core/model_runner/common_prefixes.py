"""Common prefixes of a step, which attention may serve apart from the rest of its requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slotline.core.batch.scheduler_output import SchedulerOutput


class CommonPrefixes:
    """Finder that finds none. An extension may give the builder another.

    Args:
        num_groups: number of cache groups.

    Attributes:
        none: a length of 0 for each of them.
        finds: whether a step may have any, so that `of_step` is asked.
    """

    finds = False

    def __init__(self, num_groups: int = 0) -> None:
        self.none = (0,) * num_groups

    def of_step(self, schedule: SchedulerOutput) -> tuple[int, ...]:
        """Return the tokens of the prefix to serve apart in a step, by cache group, 0 for none."""
        return self.none

    def longest(self, query_lens: npt.NDArray[np.int64], seq_len: int) -> tuple[int, ...]:
        """Return the longest prefixes, by cache group, of requests of equal length.

        Args:
            query_lens: [n] int64, tokens of each that a step computes.
            seq_len: tokens of each after the step.
        """
        return self.none
