"""Turns: consecutive steps take different requests, so that every rank of a pipeline has one to work on.

While the last stage computes a step, the stages before it are at the next ones. A request's next token needs its last
one, so those steps must be of other requests. Nothing is divided for good: a step takes requests that are in none of
the steps just before, and at most its share of all.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]


class Turns:
    """Choice of each step's requests.

    Attributes:
        count: steps that are to have different requests.
        unfinished: number of requests, those that wait included.
    """

    def __init__(self, count: int, max_requests: int) -> None:
        self.count = count
        self.unfinished = 0
        self._max_requests = max_requests
        self._under_way: deque[Int] = deque()  # rows of the steps that were not handed out, the oldest first
        self._taken = 0  # by the step that is being scheduled

    def begin(self) -> None:
        """Begin to schedule a step."""
        self._taken = 0

    def limit(self, rows: Int, counts: Int) -> Int:
        """Return the tokens [n] of the running `rows` [n] in the next step, of the `counts` [n] that they could have.

        Where all that could go on are in the steps just before, these go on, unless others wait to begin.
        """
        if self.count == 1 or not len(rows):
            return counts
        busy = np.zeros(self._max_requests, bool)
        busy[[row for step in self._under_way for row in step.tolist()]] = True
        ready, active = counts > 0, int(((counts > 0) | busy[rows]).sum())
        busy[:] = False
        for step in list(self._under_way)[1 - self.count :]:
            busy[step] = True
        chosen = ready & ~busy[rows]
        if not chosen.any() and self.unfinished <= len(rows):
            chosen = ready
        places = np.flatnonzero(chosen)[: -(-active // self.count)]
        limited = np.zeros_like(counts)
        limited[places] = counts[places]
        self._taken = len(places)
        return limited

    def may_begin(self) -> bool:
        """Return True if a waiting request may begin in the step that is being scheduled."""
        share = -(-min(self.unfinished, self._max_requests) // self.count)
        return self._taken < max(share, 1)

    def begun(self) -> None:
        """Count a request that begins in the step that is being scheduled."""
        self._taken += 1

    def launched(self, rows: Int) -> None:
        """Note the rows of a step that is under way from now on."""
        self._under_way.append(rows)

    def ended(self) -> None:
        """Note that the oldest step was handed out."""
        if self._under_way:
            self._under_way.popleft()

    def forget(self) -> None:
        """Forget the steps that are under way."""
        self._under_way.clear()
