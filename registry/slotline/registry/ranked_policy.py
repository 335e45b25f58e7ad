"""Base of scheduler policies whose order follows from what a request is when it begins to wait."""

from __future__ import annotations

import heapq

from slotline.registry.contracts.scheduler_policy import PolicyRequest, Rank


class RankedPolicy:
    """Waiting requests by rank, then by arrival. Without another `rank` it is first come, first served.

    See `slotline.registry.contracts.scheduler_policy.SchedulerPolicy`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int]] = []

    def rank(self, request: PolicyRequest) -> Rank:
        """Return the rank that orders waiting and running requests, by default that of the arrival."""
        return (request.number,)

    def push(self, request: PolicyRequest) -> None:
        """See `SchedulerPolicy.push`."""
        heapq.heappush(self._heap, (self.rank(request), request.number))

    def head(self) -> int:
        """See `SchedulerPolicy.head`."""
        return self._heap[0][1]

    def remove(self, number: int) -> None:
        """See `SchedulerPolicy.remove`."""
        if self._heap[0][1] == number:
            heapq.heappop(self._heap)
        else:
            self._heap = [entry for entry in self._heap if entry[1] != number]
            heapq.heapify(self._heap)

    def restart(self) -> None:
        """See `SchedulerPolicy.restart`."""
        self._heap.clear()
