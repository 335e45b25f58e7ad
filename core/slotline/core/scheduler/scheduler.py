"""The scheduler: the tokens that the next step computes for each request.

There is no prefill or decode phase: a request has known tokens and computed tokens, and a step computes some of the
difference, and verifies the tokens after it, if there are any. Running requests go first. Then waiting requests are
admitted while tokens, rows and blocks last. When blocks run out, tokens to verify are dropped first. Then a running
request loses its blocks and is computed again later. Who goes first and who loses is asked of a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import numpy.typing as npt
from attrs import evolve

from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.request import Request, Status
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.kv_cache.kv_cache_manager import KVCacheManager
from slotline.registry.policy_queue import BuiltPolicy, PolicyQueue

Int = npt.NDArray[np.int64]
EARLY = 4
"""Steps whose blocks running requests get together if there are plenty, so that most steps change no table."""
PLENTY = 8
"""Blocks for each of them that stay free then."""


class Scheduler:
    """Scheduler with a token budget, the order of a policy, and preemption by recomputation.

    Attributes:
        lookahead: tokens after a step's own that a request gets blocks for if there are any, since an
            extension's attention writes there.
        extensions: methods of the step extensions.
    """

    def __init__(
        self,
        rows: RequestTable,
        cache: KVCacheManager,
        *,
        max_batched_tokens: int,
        chunked_prefill: bool = True,
        default_seed: int = 0,
        lookahead: int = 0,
        extensions: Extensions = NO_EXTENSIONS,
        policy: BuiltPolicy | None = None,
    ) -> None:
        self.rows = rows
        self.cache = cache
        self.max_batched_tokens = max_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.default_seed = default_seed
        self.lookahead = lookahead
        self.extensions = extensions
        self.running: list[Request] = []
        self._waiting = PolicyQueue[Request](policy or BuiltPolicy(), rows, cache.pool, max_batched_tokens)
        self._running_rows: Int = np.zeros(0, np.int64)
        self._failed: list[tuple[Request, Exception]] = []  # in the step that is being scheduled
        # Running rows, their order, and the step made of them.
        self._last: tuple[Int, Int, SchedulerOutput] | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: new and preempted ones."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request that has been validated."""
        self._waiting.push(request)

    def validate(self, request: Request) -> None:
        """Have the policy look at a new request. Raise RequestError if it refuses it."""
        self._waiting.validate(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and give their requests rows and blocks.

        A request that cannot be scheduled, for instance since a plugin of the cache raises, is left out of the step.
        """
        self._failed = []
        for prepare in self.extensions.before_schedule:
            self._failed += [(self.rows.request(row), error) for row, error in prepare(self._running_rows)]
        for requeue in self.extensions.requeue:
            self.recompute(requeue())
        self._waiting.begin_step(len(self.running))
        rows, counts, preempted = self._schedule_running()
        admitted: list[Request] = []
        if self._waiting and not preempted:
            admitted, more = self._admit(self._waiting.tokens - int(counts.sum()))
            some = np.array(more, np.int64) > 0  # an extension may leave a request without work for now
            rows = np.concatenate([rows, np.array([r.row for r in admitted], np.int64)[some]])
            counts = np.concatenate([counts, np.array(more, np.int64)[some]])
        schedule = self._in_batch_order(rows, counts, admitted, preempted)
        return evolve(schedule, failed=tuple(self._failed)) if self._failed else schedule

    def remove(self, request: Request) -> None:
        """Take a request out, whether it runs or waits, and give back its row and blocks."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._refresh()
        else:
            self._waiting.remove(request)
        self._leave(request)

    def remove_running(self, requests: list[Request]) -> None:
        """Take many running requests out at once."""
        leaving = set(map(id, requests))
        self.running = [r for r in self.running if id(r) not in leaving]
        self._refresh()
        for request in requests:
            self._leave(request)

    def withdraw(self, request: Request, *, ended: bool) -> None:
        """Take the row of a request that has ended, or that begins anew, before `restore`."""
        if ended:
            self._waiting.left(request)
        self.rows.vacate(request.row)
        request.status = Status.FINISHED if ended else Status.WAITING

    def restore(self, waiting: Sequence[Request]) -> None:
        """Give back all blocks and queue the unfinished requests again, at any point of a step.

        The rows must have been restored.

        Args:
            waiting: the requests that need not wait for anything else.
        """
        self.cache.restore()
        self.running, self._last = [], None
        self._waiting.clear()
        self._refresh()
        for request in waiting:
            request.status = Status.WAITING if request.row < 0 else Status.PREEMPTED
            self.add(request)

    def recompute(self, requests: Sequence[Request]) -> None:
        """Take the blocks of running requests, and of those that they are linked to, and queue them again."""
        for request in requests:
            for one in (request, *self.extensions.all_linked(request)):
                if one.status is Status.RUNNING:
                    self.running.remove(one)
                    self._queue_again(one)

    def _schedule_running(self) -> tuple[Int, Int, list[Request]]:
        rows = self._running_rows
        counts = self._counts(rows)
        after = self.rows.num_computed_tokens[rows] + counts
        ahead = np.minimum(after + self.lookahead, self.rows.max_model_len)
        preempted: list[Request] = []
        dropped = False
        short = self.cache.rows_short(rows, ahead)
        if len(short) and (self._grow_early(rows, ahead) or self.cache.try_grow_all(rows[short], ahead[short])):
            short = short[:0]
        running = self.running.copy() if len(short) else []
        for position in short.tolist():
            request = running[position]
            if request.status is not Status.RUNNING:  # preempted below by a request before it
                continue
            if self.lookahead and self.cache.try_grow(request.row, int(ahead[position])):
                continue
            while not self.cache.try_grow(request.row, int(after[position])):
                if self.rows.num_spec_tokens[request.row]:  # a guess is not worth a preemption
                    self.rows.num_spec_tokens[request.row] = 0
                    after[position] = min(after[position], self.rows.num_tokens[request.row])
                    dropped = True
                    continue
                victims = self._preempt()
                preempted += victims
                if request in victims:
                    break
        if preempted or dropped:
            rows, kept = self._running_rows, [request.status is Status.RUNNING for request in running]
            counts = self._counts(rows, counts[kept])
        scheduled = counts > 0
        return (rows, counts, preempted) if scheduled.all() else (rows[scheduled], counts[scheduled], preempted)

    def _grow_early(self, rows: Int, ahead: Int) -> bool:
        """Give running rows their blocks for `ahead` [n] tokens, and with them those of the next steps.

        Return False, and take nothing, if less than a quarter of the pool would be left, or less than `PLENTY` blocks
        for each of them: then a block that is given too early may cost another request its own.
        """
        most = np.minimum(self.rows.length_limit[rows], self.rows.max_model_len) - 1  # a last token is not computed
        later = np.maximum(ahead, np.minimum(ahead + EARLY, most))
        short = self.cache.rows_short(rows, later)
        spare = max(self.cache.pool.num_blocks // 4, PLENTY * len(rows))
        return self.cache.try_grow_all(rows[short], later[short], spare=spare)

    def _counts(self, rows: Int, most: Int | None = None) -> Int:
        """Return the tokens of each running row in this step, see `_wanted`, as the extensions trim them."""
        counts = self._wanted(rows, most)
        for trim in self.extensions.trim_tokens:
            counts = trim(rows, counts)
        return counts

    def _wanted(self, rows: Int, most: Int | None) -> Int:
        """Return the wanted tokens of each running row in this step.

        These are the tokens left to compute, `most` at most, cut by extensions and at the end of the budget.
        """
        known = self.rows.num_tokens[rows]
        left = known - self.rows.num_computed_tokens[rows]
        left[known >= self.rows.length_limit[rows]] = 0  # its last token is sampled and not handed out yet
        guesses = self.rows.num_spec_tokens[rows]
        if guesses.any():
            if int((left + guesses)[left == 1].sum()) > self._waiting.tokens:
                self.rows.num_spec_tokens[rows] = 0  # every decode goes before any guess
            else:
                left = np.where(left > 0, left + guesses, 0)  # those of a row that waits wait, too
        if most is not None:
            left = np.minimum(left, most)  # the rows' blocks hold no more
        for limit in self.extensions.limit_tokens:
            left = limit(rows, left)
        if int(left.sum()) <= self._waiting.tokens:
            return left
        before = np.cumsum(left) - left
        within: Int = np.clip(self._waiting.tokens - before, 0, left)
        return within

    def _preempt(self) -> list[Request]:
        """Preempt the running request that the policy chooses, and those that are linked with it."""
        victims = [self._preempt_last(self._waiting.victim(self.running))]
        for other in self.extensions.all_linked(victims[0]):
            if other.status is Status.RUNNING:
                self.running.remove(other)
                self._queue_again(other)
                victims.append(other)
        return victims

    def _preempt_last(self, place: int = -1) -> Request:
        """Take the blocks of the running request at a place, the last in order, and queue it again."""
        victim = self.running.pop(place)
        self._queue_again(victim)
        return victim

    def _queue_again(self, request: Request) -> None:
        """Take the blocks of a request that runs no more, and queue it."""
        self._release(request)
        self.rows.invalidate(request.row)
        request.status = Status.PREEMPTED
        request.metrics.num_preemptions += 1
        self._waiting.push(request)
        self._refresh()

    def _admit(self, budget: int) -> tuple[list[Request], list[int]]:
        admitted: list[Request] = []
        counts: list[int] = []
        aside: list[Request] = []  # they wait for what an extension gives, or for the rows of those linked with them
        half, rows_lack = self._first_waiting(), False
        while self._waiting and budget > 0 and (half or len(admitted) < self._waiting.joining):
            request = half or self._waiting.head
            linked = self.extensions.all_linked(request)
            lacking = sum(one.row < 0 for one in (request, *linked))  # together, or two sets might hold some and wait
            if lacking and (rows_lack or lacking > self.rows.num_free):
                rows_lack = True
                if self._num_rows_waiting(len(admitted)) == 0:
                    break
                self._waiting.remove(request)
                aside.append(request)  # those go on that hold rows, and will free them
                continue
            waits = bool(aside) and request is not half
            acquired = False
            try:
                joins = request is half or self._waiting.may_join(request, len(self.running) + len(admitted))
                if joins and request.row < 0:
                    joins = acquired = self._acquire(request, passing=waits)
                if not joins:
                    self._waiting.remove(request)
                    aside.append(request)
                    half = None
                    continue
                count = self._try_admit(request, budget)
            except Exception as error:  # a plugin's code may raise anything, and the others go on
                self._fail(request, error, acquired=acquired)
                half = None
                continue
            if count is None:
                if acquired:
                    self._give_back(request)
                break
            self._waiting.remove(request, runs=True)
            admitted.append(request)
            counts.append(count)
            budget -= count
            half = next((one for one in linked if one.status is not Status.RUNNING), None)
        for request in aside:
            self.add(request)
        if admitted:
            self.running.extend(admitted)
            self.running.sort(key=lambda r: r.order)
            self._refresh()
        return admitted, counts

    def _fail(self, request: Request, error: Exception, *, acquired: bool) -> None:
        """Leave out a request that cannot be admitted. `acquired` is True if `_acquire` took something for it."""
        self._waiting.remove(request)
        self._failed.append((request, error))
        if request.row < 0:
            self._unschedule(request)
        if request.row < 0 and acquired:
            self._give_back(request)

    def _first_waiting(self) -> Request | None:
        """Return the waiting request that goes before all others, whatever their priority, if there is one."""
        found = (first(self._running_rows) for first in self.extensions.first_waiting)
        return next((request for request in found if request is not None), None)

    def _num_rows_waiting(self, num_admitted: int) -> int:
        """Count the waiting preempted requests with a row, after `num_admitted` were admitted in this step."""
        return self.rows.max_requests - self.rows.num_free - len(self.running) - num_admitted

    def _acquire(self, request: Request, *, passing: bool) -> bool:
        """Take what a request without a row needs to run. Return False if it has to wait, and take nothing then."""
        with ExitStack() as taken:
            for acquire, give_back in self.extensions.acquire:
                if not acquire(request, passing=passing):
                    return False
                taken.callback(give_back, request)
            taken.pop_all()
        return True

    def _give_back(self, request: Request) -> None:
        for _, give_back in self.extensions.acquire:
            give_back(request)

    def _try_admit(self, request: Request, budget: int) -> int | None:
        """Return the request's tokens that fit into this step. Return None if it has to wait, and take nothing then."""
        known = self._known_tokens(request)
        hit, prefix = self.cache.find_prefix(request, known)
        count = len(known) - hit
        if count > budget:
            if not self.chunked_prefill and len(known) <= self.max_batched_tokens:
                return None
            count = budget
        if (limited := self._limited(request, hit, count)) is None:
            return None
        count = limited
        fresh = request.row < 0
        row = self.rows.admit(request, self._seed(request)) if fresh else request.row
        ahead = min(hit + count + self.lookahead, self.rows.max_model_len)
        admit = partial(self.cache.try_admit, row, prefix, hashes=request.block_hashes)
        if not admit(ahead) and not admit(hit + count):
            if fresh:
                self.rows.release(request)
            self._unschedule(request)
            return None
        for begin in self.extensions.begin_request:
            begin(request, hit)
        self.rows.num_computed_tokens[row] = hit
        if request.status is Status.WAITING:
            request.metrics.num_cached_tokens = hit
            request.metrics.num_loaded_tokens = self.cache.tokens_to_fill(prefix)
        request.status = Status.RUNNING
        return count

    def _limited(self, request: Request, computed: int, count: int) -> int | None:
        """Return the tokens that extensions let a waiting request compute of `count`. Return None if it has to wait."""
        for limit in self.extensions.limit_prompt:
            if (limited := limit(request, computed, count)) is None:
                self._unschedule(request)
                return None
            count = limited
        return count

    def _known_tokens(self, request: Request) -> npt.NDArray[np.int32]:
        if request.row < 0:
            return request.token_array.astype(np.int32)
        return self.rows.token_ids[request.row, : self.rows.num_tokens[request.row]]

    def _seed(self, request: Request) -> int:
        """Return a seed for a request without one, made from the engine's seed and its order of arrival."""
        return (
            self.default_seed * 0xDA942042E4DD58B5 + request.arrival * 0xD1342543DE82EF95 + request.index + 1
        ) % 2**64

    def _in_batch_order(
        self, rows: Int, counts: Int, admitted: list[Request], preempted: list[Request]
    ) -> SchedulerOutput:
        computed, longer = self.rows.num_computed_tokens[rows], counts > 1
        if self._last is not None and rows is self._last[0] and not longer.any():
            _, order, last = self._last
            if ((computed := computed[order]) == last.num_computed + 1).all():  # all as in the last step, a token on
                self._last = rows, order, evolve(last, num_computed=computed, preempted=(), same_batch=True)
                return self._last[2]
            computed = self.rows.num_computed_tokens[rows]
        # Kernels take requests in this order. The work of a single token grows with its keys, and work that is begun
        # longest first leaves no multiprocessor with a long remainder at the end (Graham 1969).
        order = np.argsort(np.where(longer, 1, -computed), kind="stable")
        counts = counts[order]
        schedule = SchedulerOutput(
            rows=rows[order],
            num_scheduled=counts,
            num_computed=computed[order],
            num_tokens=int(counts.sum()),
            num_decodes=len(counts) - int(longer.sum()),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
        )
        self._last = (rows, order, schedule) if rows is self._running_rows and not longer.any() else None
        return schedule

    def _refresh(self) -> None:
        self._running_rows = np.array([r.row for r in self.running], np.int64)

    def _leave(self, request: Request) -> None:
        self._waiting.left(request)
        if request.row >= 0:
            self._release(request)
            self.rows.release(request)
        request.status = Status.FINISHED

    def _release(self, request: Request) -> None:
        """Give back the request's blocks, and what extensions took for its steps."""
        self.cache.release(request.row)
        self._unschedule(request)

    def _unschedule(self, request: Request) -> None:
        for unschedule in self.extensions.unschedule:
            unschedule(request)
