"""Comparison of a store with computing: one that takes longer for a token is left out for some requests."""

from __future__ import annotations

import time

from attrs import define, field

ENOUGH_TOKENS = 256
"""Tokens that must have been loaded, and computed, before they are compared."""
ENOUGH_SECONDS = 0.5
"""Time that loading must have taken before it is compared."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096
"""Requests for which a slow store is left out, at first and at most. Each time in a row doubles it."""


@define(eq=False)
class Rate:
    """Seconds and tokens of late. Old ones fade."""

    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: float) -> None:
        """Count more of both."""
        if self.tokens > 64 * ENOUGH_TOKENS:
            self.seconds, self.tokens = self.seconds / 2, self.tokens / 2
        self.seconds += seconds
        self.tokens += tokens

    @property
    def per_token(self) -> float:
        """Return the seconds of a token, 0 if there were none."""
        return self.seconds / self.tokens if self.tokens else 0.0


@define(eq=False)
class LoadSpeed:
    """Time of loaded tokens beside that of computed tokens of prompts.

    Attributes:
        active: whether a slow store is left out.
        loading, computing: time of tokens.
        left_out: times that the store was left out.
        skipped: requests for which it was not asked.
    """

    active: bool
    loading: Rate = field(factory=Rate)
    computing: Rate = field(factory=Rate)
    left_out: int = 0
    skipped: int = 0
    _pause: int = FIRST_PAUSE
    _left: int = 0  # requests of this pause
    _since: float | None = None  # when loads were last seen under way
    _results: float = 0.0  # time of the last results

    @property
    def is_slow(self) -> bool:
        """Return whether loading takes longer than computing, as far as this rank can tell."""
        loads, computes = self.loading, self.computing
        enough = min(loads.tokens, computes.tokens) >= ENOUGH_TOKENS and loads.seconds >= ENOUGH_SECONDS
        return self.active and enough and loads.per_token > computes.per_token

    def computed(self) -> float:
        """Return the seconds in which a token is computed, 0 while they are not known."""
        return self.computing.per_token if self.computing.tokens >= ENOUGH_TOKENS else 0.0

    @property
    def pausing(self) -> bool:
        """Return whether the store is left out."""
        return self._left > 0

    @property
    def requests_left(self) -> int:
        """Return the number of requests for which the store is still left out."""
        return self._left

    def leave_out(self) -> None:
        """Leave the store out for some requests, and measure it anew afterwards."""
        self.left_out += 1
        self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self.loading, self._since = Rate(), None

    def next_request(self) -> None:
        """Count a request that looks for blocks."""
        if self._left:
            self._left -= 1
            self.skipped += 1

    def loads_under_way(self, tokens: int, *, more: bool) -> None:
        """Count the time since the last call in which loads were under way.

        Args:
            tokens: of the loads that have ended since.
            more: whether any are under way now.
        """
        now = time.perf_counter()
        self.loading.add(0.0 if self._since is None else now - self._since, tokens)
        self._since = now if more else None
        if self.loading.tokens >= ENOUGH_TOKENS and self.loading.seconds >= ENOUGH_SECONDS and not self.is_slow:
            self._pause = FIRST_PAUSE

    def step(self, started: float, tokens: int, requests: int) -> None:
        """Count a step whose results have come, if it computed much of prompts.

        Args:
            started: time of its launch. It waited for the results of the step before.
            tokens, requests: of the step.
        """
        now = time.perf_counter()
        if tokens >= 4 * requests:
            self.computing.add(now - max(started, self._results), tokens)
        self._results = now
