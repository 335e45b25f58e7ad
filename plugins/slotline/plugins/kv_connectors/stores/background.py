"""Threads that do what may take long, and hand their results to the thread that asks for them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

logger = logging.getLogger("slotline")

Work = Callable[[], Any]
Done = Callable[[Any], None]
_Job = tuple[int, Work] | None


class Background:
    """Threads in lanes. The jobs of a lane begin in the order in which they came.

    Args:
        lanes: number of threads of each lane, by its name.
    """

    def __init__(self, lanes: dict[str, int]) -> None:
        self._queues: dict[str, SimpleQueue[_Job]] = {lane: SimpleQueue() for lane in lanes}
        self._results: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._done: dict[int, Done] = {}  # not in the queues: threads would keep a connector that nobody asks any more
        self._numbers = count()
        threads = [
            threading.Thread(target=_serve, args=(self._queues[lane], self._results), name=f"kv-{lane}", daemon=True)
            for lane, count in lanes.items()
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        ends = [queue for lane, queue in self._queues.items() for _ in range(lanes[lane])]
        self.stop = weakref.finalize(self, _stop, ends, threads)

    @property
    def under_way(self) -> int:
        """Return the number of jobs whose `done` was not called."""
        return len(self._done)

    def submit(self, lane: str, work: Work, done: Done) -> None:
        """Run `work` in a thread of the lane. `poll` calls `done` with what it returned, or with its exception."""
        number = next(self._numbers)
        self._done[number] = done
        self._queues[lane].put((number, work))

    def poll(self, wait: float = 0.0) -> bool:
        """Call `done` of the jobs that have ended. Return whether there were any.

        Args:
            wait: seconds to wait for the first.
        """
        found = False
        while True:
            try:
                number, result = self._results.get(timeout=wait) if wait and not found else self._results.get_nowait()
            except Empty:
                return found
            found = True
            self._done.pop(number)(result)


def _serve(jobs: SimpleQueue[_Job], results: SimpleQueue[tuple[int, Any]]) -> None:
    """Run jobs until None comes."""
    while (job := jobs.get()) is not None:
        number, work = job
        try:
            result = work()
        except Exception as error:  # whoever asked decides what it means
            result = error
        results.put((number, result))
        del job, work, result  # a thread that waits holds no memory of a connector


def _stop(queues: Sequence[SimpleQueue[_Job]], threads: Sequence[threading.Thread]) -> None:
    """End the threads once they have done what they were given, and wait a little for them."""
    for queue in queues:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=2.0)
