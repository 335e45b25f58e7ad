"""Named scopes of a step: seconds and counts by part, and ranges in torch's profiler. Free when switched off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch


class StepProfiler:
    """Times the parts of a step.

    Attributes:
        scope: called with a name, returns a context that times the code inside under it.
        seconds: by scope, summed.
        counts: by scope.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.scope: Callable[[str], AbstractContextManager[Any]] = nullcontext
        if enabled:
            self.enable()

    def enable(self) -> None:
        """Time the parts of the steps from now on."""
        self.enabled, self.scope = True, self._timed

    def disable(self) -> None:
        """Stop timing. The measured times stay."""
        self.enabled, self.scope = False, nullcontext

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
