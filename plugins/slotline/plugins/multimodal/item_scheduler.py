"""Scheduling of items: the tokens of a step end before an item that the step cannot encode."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from slotline.core.batch.request import Request, Status
from slotline.core.batch.request_table import NO_LIMIT, RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.plugins.multimodal.encoder_cache import EncoderCache
from slotline.plugins.multimodal.features import Feature, features_of, hash_extra
from slotline.plugins.multimodal.keys_ahead import without_part

Int = npt.NDArray[np.int64]


@frozen(eq=False)
class StepItems:
    """Items of a step.

    Attributes:
        encode: items to encode before the step's forward pass.
        dropped: hashes of items whose embeddings are freed before that.
        features: items with embeddings among the step's tokens, each with its row.
    """

    encode: tuple[Feature, ...] = ()
    dropped: tuple[str, ...] = ()
    features: tuple[tuple[int, Feature], ...] = ()


class ItemScheduler:
    """Scheduler's part of the extension. It holds no tensors.

    Attributes:
        rows: the request table.
        cache: which items are encoded, and which requests hold them.
        max_batched_tokens: of a step.
        chunked_prefill: True if a prompt's items may be encoded in several steps.
        looks_ahead: True if a step must not end within a run of an item's tokens.
        next_feature: [max_requests] int64, of each row that has joined a step, the first token of the first item whose
            span is not computed yet. NO_LIMIT for none.
    """

    def __init__(
        self,
        rows: RequestTable,
        cache: EncoderCache,
        *,
        max_batched_tokens: int,
        chunked_prefill: bool,
        looks_ahead: bool,
    ) -> None:
        self.rows = rows
        self.cache = cache
        self.max_batched_tokens = max_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.looks_ahead = looks_ahead
        self._idle: set[Request] = set()  # requests that have been admitted, and have not computed anything since
        self.next_feature = np.full(rows.max_requests, NO_LIMIT, np.int64)

    def prepare_request(self, request: Request) -> None:
        """Have block hashes tell items apart, and count the keys of cross-attention."""
        if features := features_of(request):
            request.hash_extra = partial(hash_extra, features)
            request.fixed_len = sum(feature.size for feature in features if feature.cross)

    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        """Return `counts` [n], cut in each row before the first item that cannot be encoded in this step."""
        computed, left = self.rows.num_computed_tokens[rows], counts.copy()
        for position in np.flatnonzero((left > 0) & (self.next_feature[rows] < computed + left)).tolist():
            budget = max(0, self.max_batched_tokens - int(left[:position].sum()))
            request, count = self.rows.request(int(rows[position])), min(int(left[position]), budget)
            left[position] = self._reach(request, int(computed[position]), count)
            self._find_next(request)
        return left

    def limit_prompt(self, request: Request, computed: int, count: int) -> int | None:
        """Return the tokens before the first item that cannot be encoded, None for no tokens.

        A prompt that is not split waits until all its items can be.
        """
        if not features_of(request):
            return count
        if not count:  # it is admitted without work, and needs its items later
            self._idle.add(request)
            return 0
        reached = self._reach(request, computed, count)
        return reached if reached and (reached == count or self.chunked_prefill) else None

    def unschedule(self, request: Request) -> None:
        """Release what the request holds."""
        self._idle.discard(request)
        self.cache.release(request)

    def take(self, schedule: SchedulerOutput) -> tuple[SchedulerOutput, StepItems]:
        """Return a scheduled step, which runs eagerly if it has items, and its items, those to encode too."""
        for request in schedule.admitted:
            if request.row >= 0:
                self._find_next(request)
        firsts, ends = schedule.num_computed, schedule.num_computed + schedule.num_scheduled
        touching = np.flatnonzero(self.next_feature[schedule.rows] < ends).tolist()
        features = tuple(
            (int(schedule.rows[i]), feature)
            for i in touching
            for feature in features_of(self.rows.request(int(schedule.rows[i])))
            if feature.start < ends[i] and feature.end > firsts[i]
        )
        items = StepItems(*self.cache.take(), features)
        return (evolve(schedule, eager=True) if features else schedule), items

    def check(self) -> None:
        """Check entries, holders and requests.

        Raises:
            IntegrityError: naming what does not fit.
        """
        self.cache.check()
        for request in self.rows.requests:
            if request is not None and request.status is Status.RUNNING and request not in self._idle:
                self.cache.check_request(request, int(self.rows.num_computed_tokens[request.row]))

    def _reach(self, request: Request, computed: int, count: int) -> int:
        """Return how many of the `count` tokens after the computed ones a step can compute."""
        self._idle.discard(request)
        if self.looks_ahead:
            count = without_part(features_of(request), computed, count)
        return self.cache.reach(request, computed, count)

    def _find_next(self, request: Request) -> None:
        """Look for the `next_feature` of a request with a row, after its computed tokens changed."""
        computed = self.rows.num_computed_tokens[request.row]
        left = (feature.start for feature in features_of(request) if feature.end > computed)
        self.next_feature[request.row] = next(left, NO_LIMIT)
