"""The queue of requests that hold no blocks: new and preempted ones."""

from __future__ import annotations

import heapq

from slotline.core.batch.request import Request


class RequestQueue:
    """Requests in scheduling order, the first at the head."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def head(self) -> Request:
        """The first request. The queue must not be empty."""
        return self._heap[0][1]

    def push(self, request: Request) -> None:
        """Queue a request."""
        heapq.heappush(self._heap, (request.order, request))

    def remove(self, request: Request) -> None:
        """Take a request out, which is mostly the head. A request that is not in the queue is ignored."""
        if self._heap and self.head is request:
            heapq.heappop(self._heap)
        else:
            self._heap = [entry for entry in self._heap if entry[1] is not request]
            heapq.heapify(self._heap)
