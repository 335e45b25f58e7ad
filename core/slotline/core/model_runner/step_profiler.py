"""Named scopes of a step: seconds and counts by part, and ranges in torch's profiler. Free when switched off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

import torch


class StepProfiler:
    """Times the parts of a step.

    Attributes:
        scope: called with a name, returns a context that times the code inside under it.
        seconds, counts: by scope, summed.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.scope: Callable[[str], AbstractContextManager[object]] = self._timed if enabled else nullcontext

    @property
    def enabled(self) -> bool:
        """Whether the parts are timed. `enable` and `disable` change it."""
        return self.scope is not nullcontext

    def enable(self) -> None:
        """Time the parts of the steps from now on."""
        self.scope = self._timed

    def disable(self) -> None:
        """Stop timing. The measured times stay."""
        self.scope = nullcontext

    def reset(self) -> None:
        """Forget the measured times."""
        self.seconds.clear()
        self.counts.clear()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(f"slotline.{name}"):
            start = perf_counter()
            try:
                yield
            finally:
                self.seconds[name] += perf_counter() - start
                self.counts[name] += 1
