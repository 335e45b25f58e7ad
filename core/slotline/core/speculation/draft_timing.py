"""How long steps and proposals take on the device, read once they have passed there: nobody waits for that.

The host's clock would not tell. Where steps overlap, the host waits for a step while it prepares the next one, so what
it sees between two calls is the work of another step than the one that it is busy with.
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
    """A moment: on a CPU now, on a GPU when it has done what it was given so far."""

    at: float | torch.cuda.Event

    @classmethod
    def now(cls, *, on_gpu: bool) -> Mark:
        """The moment of this call."""
        if not on_gpu:
            return cls(perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event)

    @property
    def passed(self) -> bool:
        """Whether it lies in the past."""
        return isinstance(self.at, float) or self.at.query()

    def until(self, later: Mark) -> float:
        """Seconds between two moments that have passed."""
        if isinstance(self.at, float):
            assert isinstance(later.at, float)
            return later.at - self.at
        assert isinstance(later.at, torch.cuda.Event)
        milliseconds: float = self.at.elapsed_time(later.at)
        return milliseconds / 1e3


@define(eq=False)
class TimedStep:
    """One step.

    Attributes:
        num_tokens: of the step; `drafted` whether it verified drafts, and `decodes` whether it did nothing else.
        lengths: [n] drafts of the proposal behind it; None where nobody was asked.
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
        """Whether all of it is over on the device."""
        last = self._proposed or self._computed
        return last is None or last.passed

    @property
    def seconds(self) -> float | None:
        """Of the step without the proposal; None where it did not get that far."""
        return None if self._computed is None else self._start.until(self._computed)

    @property
    def draft_seconds(self) -> float | None:
        """Of the proposal."""
        if self._computed is None or self._proposed is None:
            return None
        return self._computed.until(self._proposed)


class StepTimes:
    """Times one step after the other; a step begins on the host when the one before has been proposed behind."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self._steps: deque[TimedStep] = deque()

    def begin(self, num_tokens: int, *, drafted: bool, decodes: bool) -> None:
        """A step is launched."""
        self._steps.append(TimedStep(num_tokens, drafted, decodes, self._now()))

    def computed(self) -> None:
        """The last step's tokens, and what the drafter sees of it, are there."""
        if self._steps:
            self._steps[-1]._computed = self._now()

    def proposed(self, lengths: Int) -> None:
        """Drafts behind the last step are there, `lengths` [n] of them."""
        if self._steps:
            self._steps[-1]._proposed, self._steps[-1].lengths = self._now(), lengths

    def take(self) -> Iterator[TimedStep]:
        """The steps that are over and were not taken yet; the last one begun is not over."""
        while len(self._steps) > 1 and self._steps[0].passed:
            yield self._steps.popleft()

    def _now(self) -> Mark:
        return Mark.now(on_gpu=self._on_gpu)
