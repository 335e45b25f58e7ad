"""Comparison of a tier with computing: one that takes longer for a token is left out for some time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from attrs import define, field

from slotline.plugins.kv_transfer.speed import ENOUGH_SECONDS, ENOUGH_TOKENS, Rate

logger = logging.getLogger("slotline")

FIRST_PAUSE, LONGEST_PAUSE = 10.0, 640.0
"""Seconds for which a slow tier is left out, at first and at most. Each time in a row doubles them."""


@define(eq=False)
class TierSpeed:
    """Time of the tokens of a tier.

    Attributes:
        name: of the tier.
        computing: see `KVConnectorContext`.
        left_out: times that the tier was left out.
    """

    name: str
    computing: Callable[[], float] | None
    left_out: int = 0
    _loading: Rate = field(factory=Rate)
    _since: float | None = None  # when loads were last seen under way
    _pause: float = FIRST_PAUSE
    _until: float = 0.0

    @property
    def pausing(self) -> bool:
        """Return whether the tier is left out."""
        return bool(self._until) and time.monotonic() < self._until

    def begin(self) -> None:
        """Take note that loads are under way from now on."""
        if self._since is None:
            self._since = time.monotonic()

    def count(self, tokens: int, *, more: bool) -> None:
        """Count the time since the last call in which loads were under way, and leave the tier out if it is slow.

        Args:
            tokens: of the loads that have ended since.
            more: whether any are under way now.
        """
        if self._since is None or self.computing is None:
            return
        now = time.monotonic()
        self._loading.add(now - self._since, tokens)
        self._since = now if more else None
        computing = self.computing() if tokens else 0.0
        if not computing or self._loading.tokens < ENOUGH_TOKENS or self._loading.seconds < ENOUGH_SECONDS:
            return
        if self._loading.per_token <= computing:
            self._pause = FIRST_PAUSE
            return
        text = "tier %s takes %.3f ms to load a token, and computing one takes %.3f ms: it is left out for %g s"
        logger.warning(text, self.name, 1e3 * self._loading.per_token, 1e3 * computing, self._pause)
        self.left_out += 1
        self._until, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._loading = Rate()
