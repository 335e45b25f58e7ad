"""Times of steps and proposals on the device, read after they have finished, so that nothing waits for them.

The host's clock does not measure them. With async scheduling the host waits for a step while it prepares the next one,
so the time between two calls on the host is the work of another step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from attrs import define, frozen

from slotline.core.batch.request_table import Int
from slotline.core.device.torch_device import HostTime
from slotline.registry.contracts.device import TimePoint


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
    _start: TimePoint
    _computed: TimePoint | None = None
    _proposed: TimePoint | None = None
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


@frozen(kw_only=True)
class MeasuredStep:
    """Times of a step that is over.

    Attributes:
        num_tokens, drafted, decodes: as of `TimedStep`.
        seconds: of the step without the proposal. None if it did not get that far.
        lengths: [n] drafts of the proposal after it. None if the drafter was not called.
        draft_seconds: of the proposal.
    """

    num_tokens: int
    drafted: bool
    decodes: bool
    seconds: float | None
    lengths: Int | None
    draft_seconds: float | None


class StepTimes:
    """Timer of consecutive steps. On the host, a step begins after the proposal of the previous step.

    Args:
        now: tells the time of the device, see `Device.time_point`.
    """

    def __init__(self, now: Callable[[], TimePoint] = HostTime) -> None:
        self._now = now
        self._steps: deque[TimedStep] = deque()

    def begin(self, num_tokens: int, *, drafted: bool, decodes: bool) -> None:
        """Record the launch of a step."""
        self._steps.append(TimedStep(num_tokens, drafted, decodes, self._now()))

    def record_computed(self) -> None:
        """Record that the last step's tokens are computed and observed by the drafter."""
        if self._steps:
            self._steps[-1]._computed = self._now()

    def proposed(self, lengths: Int) -> None:
        """Record the proposal of `lengths` [n] drafts after the last step."""
        if self._steps:
            self._steps[-1]._proposed, self._steps[-1].lengths = self._now(), lengths

    def take(self) -> Iterator[MeasuredStep]:
        """Yield the finished steps that were not taken yet. The last step begun is not finished."""
        while len(self._steps) > 1 and self._steps[0].passed:
            step = self._steps.popleft()
            yield MeasuredStep(
                num_tokens=step.num_tokens,
                drafted=step.drafted,
                decodes=step.decodes,
                seconds=step.seconds,
                lengths=step.lengths,
                draft_seconds=step.draft_seconds,
            )
