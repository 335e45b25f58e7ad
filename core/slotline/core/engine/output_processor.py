"""Output of a step: written to rows, cache and requests, some of which end with it."""

from __future__ import annotations

import logging
from time import monotonic

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from slotline.core.batch.extensions import NO_EXTENSIONS, Ended, Extensions
from slotline.core.batch.request import Request, leaders
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import StepOutput
from slotline.core.engine.request_finalizer import RequestFinalizer
from slotline.core.engine.stop_checker import StopChecker
from slotline.core.scheduler.scheduler import Scheduler

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")


@frozen(kw_only=True, eq=False)
class StepResult:
    """Results that a step handed out.

    Attributes:
        rows: [n] int64, rows that got a token, except hidden ones, with `token_ids` [n] int32. Under
            asynchronous scheduling they are those of the step that was started one call before.
        finished: requests that ended in this step. They no longer hold a row.
    """

    rows: Int = field(factory=lambda: np.zeros(0, np.int64))
    token_ids: npt.NDArray[np.int32] = field(factory=lambda: np.zeros(0, np.int32))
    finished: list[Request] = field(factory=list)


def joined(first: StepResult, second: StepResult) -> StepResult:
    """Return what two steps handed out."""
    return StepResult(
        rows=np.concatenate([first.rows, second.rows]),
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        finished=[*first.finished, *second.finished],
    )


@define(kw_only=True, eq=False)
class OutputProcessor:
    """Writes a step's results.

    Attributes:
        overlapped: whether a step in flight has counted all tokens that this step verifies.
        num_known: [max_requests] int64, tokens of each row before the step that is being handed out. None between
            steps.
    """

    rows: RequestTable
    scheduler: Scheduler
    stops: StopChecker
    endings: RequestFinalizer
    overlapped: bool
    extensions: Extensions = NO_EXTENSIONS
    num_known: Int | None = field(default=None, init=False)

    def __call__(self, schedule: SchedulerOutput, output: StepOutput) -> StepResult:
        """Write the step's results into rows, cache and requests, and let finished requests go."""
        self.num_known = self.rows.num_tokens - self.rows.num_pending
        for row in output.spoiled:
            self.scheduler.cache.forget(row)
        self._count(schedule, output)
        self._record(output)
        ended = self._answer(output) if output.answers else {}
        rows, token_ids = self._append(output, ended)
        if output.logprobs:
            self._keep_logprobs(output)
        for row, cause in output.failed.items():
            if row not in ended:
                logger.error("request %r failed: %s", self.rows.request(row).request_id, cause)
                ended[row] = ("error", cause)
        finished = self._finish(ended) if ended else []
        self.num_known = None
        return StepResult(rows=rows, token_ids=token_ids, finished=finished)

    def _finish(self, ended: Ended) -> list[Request]:
        """Let finished requests go. Return those that users know of."""
        finished = [self.rows.request(row) for row in ended]
        self.endings.finish(finished, [reason for reason, _ in ended.values()], [cause for _, cause in ended.values()])
        return leaders(finished)

    def _count(self, schedule: SchedulerOutput, output: StepOutput) -> None:
        """Update the computed tokens of rows, states and cache. Those of rejected tokens do not count."""
        rows, cache = self.rows, self.scheduler.cache
        ends = computed = schedule.num_computed + schedule.num_scheduled
        if output.spec_positions is not None:
            computed = self._standing(schedule, output)
            rows.num_computed_tokens[schedule.rows] -= ends - computed  # a step in flight may have added its own
        if self.extensions.roll_back and (self.overlapped or output.spec_positions is not None):
            accepted, verified = computed - schedule.num_computed, ends > rows.num_known(schedule.rows)
            for roll_back in self.extensions.roll_back:
                roll_back(schedule.rows, schedule.num_scheduled, accepted, verified)
        rows.num_rejected[schedule.rows] = ends - computed
        cache.commit(rows, schedule.rows, computed)

    def _standing(self, schedule: SchedulerOutput, output: StepOutput) -> Int:
        """Return the tokens of a step's rows [num_requests] computed after it, without rejected ones."""
        rows = self.rows
        computed = rows.num_computed_tokens.copy()
        computed[schedule.rows] = schedule.num_computed + schedule.num_scheduled
        failed = np.array(list(output.failed), np.int64)
        computed[failed] = rows.num_known(failed)
        if (kept := output.spec_positions if output.num_kept is None else output.num_kept) is not None:
            computed[output.rows] = rows.num_known(output.rows) + kept
        standing: Int = computed[schedule.rows]
        return standing

    def _record(self, output: StepOutput) -> None:
        """Keep prompt log-probabilities, NaN counts and first-token times, before the step's tokens are appended."""
        rows = self.rows
        for row, (first, entries) in output.prompt_logprobs.items():
            rows.request(row).prompt_logprobs[first : first + len(entries)] = entries  # type: ignore[index]
        for row, count in output.num_nans.items():
            rows.request(row).metrics.num_nans += count
        assert self.num_known is not None
        fresh = output.rows[self.num_known[output.rows] == rows.num_prompt_tokens[output.rows]]
        if len(fresh):
            now = monotonic()
            for row in fresh.tolist():
                request = rows.request(row)
                request.metrics.time_to_first_token = now - request.arrival_time

    def _answer(self, output: StepOutput) -> Ended:
        """Give requests that sample nothing their answers, which ends them."""
        for row, vector in output.answers.items():
            self.rows.request(row).answer = vector.copy()
        return dict.fromkeys(output.answers, ("stop", None))

    def _append(self, output: StepOutput, ended: Ended) -> tuple[Int, npt.NDArray[np.int32]]:
        """Append tokens, as long as their rows have not ended, and add to `ended` the rows that do with them.

        Returns:
            The rows that got a token and the tokens [n], without hidden rows.
        """
        if output.spec_positions is None:
            return self._append_each(output.rows, output.token_ids, ended)
        given = [self._append_each(which, tokens, ended) for which, tokens in output.rounds(output.spec_positions)]
        which, tokens = map(np.concatenate, zip(*given, strict=True))
        return which, tokens

    def _append_each(
        self, which: Int, tokens: npt.NDArray[np.int32], ended: Ended
    ) -> tuple[Int, npt.NDArray[np.int32]]:
        """Append one token to each of the distinct rows `which` [n], see `_append`."""
        rows = self.rows
        if ended:
            goes_on = ~np.isin(which, list(ended))
            which, tokens = which[goes_on], tokens[goes_on]
        rows.append(which, tokens)
        ended |= self.stops.ended(which, tokens)
        for advance in self.extensions.advance:
            ended |= advance(which, tokens, ended)
        if rows.any_hidden:
            asked = ~rows.hidden[which]
            which, tokens = which[asked], tokens[asked]
        return which, tokens

    def _keep_logprobs(self, output: StepOutput) -> None:
        """Keep the log-probabilities of the tokens that were handed out."""
        for row, entries in output.logprobs.items():
            request = self.rows.request(row)
            missing = int(self.rows.num_tokens[row] - self.rows.num_prompt_tokens[row]) - len(request.logprobs or ())
            request.logprobs += entries[:missing]  # type: ignore[operator]
