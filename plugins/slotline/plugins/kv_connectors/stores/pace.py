"""How much of a step may go into loads of others, measured while steps run."""

from __future__ import annotations

from time import perf_counter, thread_time

SHARE = 0.01
"""Part of the work of the steps' thread that loads may take. It grows by as much with each second that the oldest load
has lasted, so that long loads end too."""
WAITS = 0.1
"""Part of all time that counts as work of a thread that does less, since it waits for others."""


class Pace:
    """Time that loads may take of the steps, where these wait for copies.

    A poll goes on with its loads as long as `is_left`. What it takes beyond its part, the next polls do without. The
    time on a processor is counted, not that in which other programs have it.
    """

    def __init__(self) -> None:
        self._passed = False  # whether a forward pass was launched since the last poll
        self._beside = False  # before that poll
        self._polled, self._began = perf_counter(), thread_time()  # when the last poll began
        self._credit = 0.0

    @property
    def beside(self) -> bool:
        """Return whether a forward pass was launched between the last two polls: other requests run."""
        return self._beside

    @property
    def is_left(self) -> bool:
        """Return whether loads may go on in this poll."""
        return not self._beside or thread_time() - self._began < self._credit

    def launched(self) -> None:
        """Take note of a forward pass that is about to be launched."""
        self._passed = True

    def restart(self) -> None:
        """Begin anew, since no load was under way."""
        self._passed, self._credit = False, 0.0
        self._polled, self._began = perf_counter(), thread_time()

    def begin(self, oldest: float | None) -> None:
        """Begin a poll.

        Args:
            oldest: when the oldest load began (`perf_counter`), None if there is none.
        """
        now, work = perf_counter(), thread_time()
        self._beside, self._passed = self._passed, False
        age = 0.0 if oldest is None else now - oldest
        self._credit = min(self._credit, 0.0) + SHARE * (1 + age) * max(
            work - self._began, WAITS * (now - self._polled)
        )
        self._polled, self._began = now, work

    def end(self) -> None:
        """End a poll."""
        self._credit = self._credit - (thread_time() - self._began) if self._beside else 0.0
