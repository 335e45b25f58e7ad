"""Admission of requests to a step: preparation by plugins, before the step runs."""

from __future__ import annotations

import logging

from attrs import define, evolve

from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.request import Request, leaders
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.engine.request_finalizer import RequestFinalizer
from slotline.core.sampling.logits_processors import ProcessorPipeline

logger = logging.getLogger("slotline")


@define(kw_only=True, eq=False)
class AdmissionHooks:
    """Prepares the requests of a schedule, and takes out those that a plugin fails on."""

    endings: RequestFinalizer
    pipeline: ProcessorPipeline
    extensions: Extensions = NO_EXTENSIONS

    def prepare(self, schedule: SchedulerOutput) -> tuple[SchedulerOutput, list[Request]]:
        """Prepare the requests that join in this step.

        A request that a plugin fails on ends with finish reason `error`, and the step goes on without it.

        Returns:
            The rest of the step, and the requests that ended.
        """
        refused: list[tuple[Request, Exception]] = list(schedule.failed)
        for request, error in refused:
            logger.error("request %r cannot be scheduled", request.request_id, exc_info=error)
        for request in schedule.admitted:
            try:
                self._admit(request)
            except Exception as error:  # a plugin's code may raise anything, and the others go on
                logger.exception("request %r could not be admitted", request.request_id)
                refused.append((request, error))
        return self.leave_out(evolve(schedule, failed=tuple(refused))) if refused else (schedule, [])

    def leave_out(self, schedule: SchedulerOutput) -> tuple[SchedulerOutput, list[Request]]:
        """End the requests that `failed` in a step. Return the rest of the step, and the requests that ended."""
        refused = schedule.failed
        going = [other for one, _ in refused for other in (one, *self.extensions.all_linked(one))]
        rows = [one.row for one in going if one.row >= 0]
        self.endings.fail(refused)
        return evolve(schedule.without(rows), failed=()), leaders([request for request, _ in refused])

    def _admit(self, request: Request) -> None:
        """Prepare a request that joins for the first time. After preemption it is still prepared."""
        if request.joined:
            return
        if request.params.logprobs is not None:
            request.logprobs = []
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.prompt_token_ids)
        self.pipeline.admit(request)
        for admit in self.extensions.admit:
            admit(request)
        request.joined = True
