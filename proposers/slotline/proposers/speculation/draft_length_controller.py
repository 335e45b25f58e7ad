"""Adaptive draft lengths, from each request's acceptance and the measured cost of steps.

The controller maximizes a step's expected tokens per expected second (Liu et al. 2024, "Optimizing Speculative Decoding
for Serving Large Language Models Using Goodput", section 3). The draft at position i of a request is accepted with
probability p**i. Here p is the share of the request's verified drafts that were accepted, weighted towards later ones.
A step costs a + b * tokens, fitted to the steps so far. A proposal costs as much as the last ones did. Drafts are taken
by falling probability, over all requests of the batch, as long as the quotient rises. The number may fall to zero.

The choice does not depend on any draft's token, so it does not change a text's distribution.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]

FORGETTING = 0.95
"""Factor on the weight of a request's past acceptance with each step that adds evidence."""
AGEING = 0.97
"""Factor on the weight of a request's past acceptance with each step that is decided against its drafts."""
STEP_FORGETTING = 0.98
"""Factor on the weight of past measured steps."""
PRIOR_WEIGHT = 2.0
"""Weight of the acceptance over all requests, in verified drafts, against a request's own."""
PERIOD = 64
"""Number of steps in which one drafts nothing and one drafts everything, so that costs and acceptance stay known."""
LEARNING = 8
"""Steps with drafts at the start, before any decision."""
PLAIN = 3
"""Steps without drafts, spread among them, so that a run that drafts well loses no more."""


class DraftLengthController:
    """Chooser of draft lengths, one for each engine.

    Args:
        max_requests: rows of the request table.
        num_tokens: draft tokens.
        uniform: all requests of a batch draft or none, since captured graphs hold batches of equal query lengths.
    """

    def __init__(self, max_requests: int, num_tokens: int, *, uniform: bool = False) -> None:
        self.num_tokens = num_tokens
        self.uniform = uniform
        self.chosen = np.zeros(num_tokens + 1, np.int64)  # requests and steps, by drafts kept
        self.steps_without = 0  # steps decided against calling the drafter
        self._accepted = np.zeros(max_requests + 1)  # decayed; the last entry is over all requests
        self._judged = np.zeros(max_requests + 1)
        self._cost = StepCost()
        self._draft_seconds = 0.0
        self._mean_length = float(num_tokens)
        self._turn = 0

    def admit(self, row: int) -> None:
        """Reset the evidence for a new request."""
        self._accepted[row] = self._judged[row] = 0.0

    def judged(self, rows: Int, drafts: Int, accepted: Int) -> None:
        """Record a step that verified `drafts` [n] of the distinct `rows` [n] and accepted `accepted` [n]."""
        seen = accepted + (accepted < drafts)
        for total, new in ((self._accepted, accepted), (self._judged, seen)):
            total[rows] = FORGETTING * total[rows] + new
            total[-1] = FORGETTING * total[-1] + new.mean()

    def stepped(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Record a decoding step of `num_tokens` that took `seconds`, without the proposal."""
        self._cost.add(num_tokens, seconds, drafted=drafted)

    def proposed(self, lengths: Int, seconds: float) -> None:
        """Record a proposal of `lengths` [n] tokens that took `seconds`."""
        if not self._cost.known:  # the first calls may compile
            self._draft_seconds = min(seconds, self._draft_seconds or seconds)
        self._draft_seconds += 0.2 * (min(seconds, 4 * self._draft_seconds) - self._draft_seconds)
        self._mean_length = 0.9 * self._mean_length + 0.1 * float(lengths.mean())

    def should_propose(self, rows: Int) -> bool:
        """Return True if the drafter is called in this step for the drafts of `rows` [n]."""
        self._turn += 1
        if not self._cost.known:
            # Count turns, not measured steps: steps in flight are not measured yet, and none is while all include
            # prompts.
            apart = LEARNING // PLAIN + 1 if self._turn <= 2 * (LEARNING + PLAIN) else PERIOD // 4
            return not (self._turn % apart == 0 and self._cost.wants_plain)
        if self._turn % PERIOD in (0, PERIOD // 2):
            return self._turn % PERIOD == 0
        lengths = np.full(len(rows), max(1, round(self._mean_length)))
        asked = bool(self._best(rows, lengths, self._draft_seconds).any())
        if not asked:
            self.steps_without += 1
            self._age(np.append(rows, -1))
        return asked

    def lengths(self, rows: Int, lengths: Int) -> Int:
        """Return how many of the `lengths` [n] drafts proposed for `rows` [n] are verified, [n]."""
        kept = lengths
        if self._cost.known and self._turn % PERIOD:
            kept = self._best(rows, lengths, 0.0)  # the proposal's cost is already spent
            self._age(rows[(kept == 0) & (lengths > 0)])
        self.chosen += np.bincount(kept, minlength=self.num_tokens + 1)
        return kept

    def acceptance(self, rows: Int) -> Float:
        """Return the probability [n] that the next draft of each of `rows` is accepted, given those before it."""
        overall = (self._accepted[-1] + 1.0) / (self._judged[-1] + 1.5)
        found: Float = (self._accepted[rows] + PRIOR_WEIGHT * overall) / (self._judged[rows] + PRIOR_WEIGHT)
        return np.minimum(found, 0.999)

    def to_json(self) -> dict[str, Any]:
        """Return the decisions and the figures that led to them, as JSON types."""
        seen = max(int(self.chosen.sum()), 1)
        return {
            "chosen": self.chosen.tolist(),
            "mean_tokens": float((self.chosen * np.arange(len(self.chosen))).sum() / seen),
            "steps_without": self.steps_without,
            "acceptance": float(self.acceptance(np.array([-1]))[0]),
            "step_seconds": self._cost.base,
            "step_seconds_per_token": self._cost.per_token,
            "draft_seconds": self._draft_seconds,
        }

    def _age(self, rows: Int) -> None:
        """Reduce the weight of evidence for the distinct `rows` [n] without drafts, so that bad luck does not last."""
        for total in (self._accepted, self._judged):
            total[rows] *= AGEING

    def _best(self, rows: Int, lengths: Int, draft_seconds: float) -> Int:
        """Choose the drafts [n] of each row, at most `lengths` [n], with the most tokens per second."""
        position = np.arange(1, self.num_tokens + 1)
        gains: Float = np.power(self.acceptance(rows)[:, None], position)  # falling in each row
        gains[position > lengths[:, None]] = -1.0
        flat = gains.ravel()
        order = np.argsort(-flat, kind="stable")[: int(lengths.sum())]
        totals = np.arange(len(order) + 1)
        tokens = len(rows) + np.concatenate([[0.0], np.cumsum(flat[order])])
        seconds = self._cost.of(len(rows) + totals) + draft_seconds * (totals > 0)
        rates = tokens / np.maximum(seconds, 1e-9)
        if self.uniform:  # missing drafts of a request are filled up
            whole = self._cost.of(np.array([len(rows) * (1 + self.num_tokens)])) + draft_seconds
            return lengths if tokens[-1] > rates[0] * whole[0] else np.zeros_like(lengths)
        taken = np.zeros(flat.size, bool)
        taken[order[: int(rates.argmax())]] = True
        kept: Int = taken.reshape(gains.shape).sum(1)
        return kept


class StepCost:
    """Seconds of a decoding step as base + per_token * tokens, a least-squares fit that forgets."""

    def __init__(self) -> None:
        self.base = self.per_token = 0.0
        self._sums = np.zeros(5)  # of 1, x, y, x * x, x * y
        self._first = {drafted: deque[tuple[int, float]](maxlen=LEARNING) for drafted in (False, True)}

    @property
    def known(self) -> bool:
        """Return True if steps with and without drafts were measured."""
        return len(self._first[True]) >= LEARNING and not self.wants_plain

    @property
    def wants_plain(self) -> bool:
        """Return True if more steps without drafts must be measured before any decision."""
        return len(self._first[False]) < PLAIN

    def add(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Add a step. The time of an exceptionally slow step is capped."""
        if self.known:
            self._fit(num_tokens, min(seconds, 4 * float(self.of(np.array([num_tokens]))[0])))
            return
        self._first[drafted].append((num_tokens, seconds))
        if self.known:
            for steps in self._first.values():  # the first step of each kind may compile
                most = 2 * float(np.median([took for _, took in steps]))
                for tokens, took in steps:
                    self._fit(tokens, min(took, most))

    def _fit(self, num_tokens: int, seconds: float) -> None:
        self._sums = STEP_FORGETTING * self._sums + np.array(
            [1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds]
        )
        count, x, y, xx, xy = self._sums
        spread = xx - x * x / count
        self.per_token = max(0.0, float((xy - x * y / count) / spread)) if spread > 1e-9 * xx else 0.0
        self.base = max(0.0, float((y - self.per_token * x) / count))

    def of(self, num_tokens: Int) -> Float:
        """Return the expected seconds of steps with these numbers of tokens."""
        return self.base + self.per_token * num_tokens.astype(np.float64)
