"""Times of steps and proposals on the device, read after they have finished, so that nothing waits for them.

The host's clock does not measure them. With async scheduling the host waits for a step while it prepares the next one,
so the time between two calls on the host is the work of another step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import perf_counter

import torch
from attrs import define

from slotline.core.batch.request_table import Int


@define(eq=False)
class Mark:
    """A point in time: the call on a CPU, the end of all work launched so far on a GPU."""

    at: float | torch.cuda.Event

    @classmethod
    def now(cls, *, on_gpu: bool) -> Mark:
        """Return the time of this call."""
        if not on_gpu:
            return cls(perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event)

    @property
    def passed(self) -> bool:
        """Return True if the time has passed."""
        return isinstance(self.at, float) or self.at.query()

    def until(self, later: Mark) -> float:
        """Return the seconds between two times that have passed."""
        if isinstance(self.at, float):
            assert isinstance(later.at, float)
            return later.at - self.at
        assert isinstance(later.at, torch.cuda.Event)
        milliseconds: float = self.at.elapsed_time(later.at)
        return milliseconds / 1e3


@define(eq=False)
class TimedStep:
    """Times of one step.

    Attributes:
        num_tokens: tokens of the step.
        drafted: True if it verified drafts.
        decodes: True if it only decoded.
        lengths: [n] drafts of the proposal after it. None if the drafter was not called.
    """

    num_tokens: int
    drafted: bool
    decodes: bool
    _start: Mark
    _computed: Mark | None = None
    _proposed: Mark | None = None
    lengths: Int | None = None

    @property
    def passed(self) -> bool:
        """Return True if the step is over on the device."""
        last = self._proposed or self._computed
        return last is None or last.passed

    @property
    def seconds(self) -> float | None:
        """Return the seconds of the step without the proposal. None if it did not get that far."""
        return None if self._computed is None else self._start.until(self._computed)

    @property
    def draft_seconds(self) -> float | None:
        """Return the seconds of the proposal."""
        if self._computed is None or self._proposed is None:
            return None
        return self._computed.until(self._proposed)


class StepTimes:
    """Timer of consecutive steps. On the host, a step begins after the proposal of the previous step."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self._steps: deque[TimedStep] = deque()

    def begin(self, num_tokens: int, *, drafted: bool, decodes: bool) -> None:
        """Record the launch of a step."""
        self._steps.append(TimedStep(num_tokens, drafted, decodes, self._now()))

    def computed(self) -> None:
        """Record that the last step's tokens are computed and observed by the drafter."""
        if self._steps:
            self._steps[-1]._computed = self._now()

    def proposed(self, lengths: Int) -> None:
        """Record the proposal of `lengths` [n] drafts after the last step."""
        if self._steps:
            self._steps[-1]._proposed, self._steps[-1].lengths = self._now(), lengths

    def take(self) -> Iterator[TimedStep]:
        """Yield the finished steps that were not taken yet. The last step begun is not finished."""
        while len(self._steps) > 1 and self._steps[0].passed:
            yield self._steps.popleft()

    def _now(self) -> Mark:
        return Mark.now(on_gpu=self._on_gpu)
