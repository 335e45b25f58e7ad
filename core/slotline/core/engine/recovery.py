"""Recovery: every unfinished request is put back after an exception escaped from the middle of a step.

The exception may come from anywhere, Ctrl-C included, so nothing that the step was about to change is trusted. What is
trusted are the unfinished requests, the rows that they hold, and the tokens that were handed out whole. All else is
made again from these: blocks are given back, plugins that keep a state by row begin anew, and every request waits to
be computed again, as after a preemption. Random numbers depend on seed and position, so the texts stay the same.
"""

from __future__ import annotations

import logging

import numpy as np
from attrs import define

from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.request import Request
from slotline.core.engine.output_processor import OutputProcessor
from slotline.core.engine.request_finalizer import RequestFinalizer
from slotline.core.sampling.logits_processors import ProcessorPipeline
from slotline.core.scheduler.scheduler import Scheduler
from slotline.text.tokenizer import Tokenizer

logger = logging.getLogger("slotline")


@define(kw_only=True, eq=False)
class Recovery:
    """Puts every unfinished request back into the queue. Running it twice does no harm.

    Attributes:
        requests: the unfinished by id.
    """

    requests: dict[str, Request]
    scheduler: Scheduler
    hand_out: OutputProcessor
    endings: RequestFinalizer
    tokenizer: Tokenizer | None
    pipeline: ProcessorPipeline
    extensions: Extensions = NO_EXTENSIONS

    def run(self) -> list[Request]:
        """Restore everything. Return the requests that ended because a plugin could not be restored."""
        rows, scheduler = self.scheduler.rows, self.scheduler
        for request in list(self.requests.values()):
            if request.row >= 0 and rows.requests[request.row] is not request:
                request.row = -1
            if request.leader is not None and self.requests.get(request.leader.request_id) is not request.leader:
                del self.requests[request.request_id]
        known = rows.num_tokens - rows.num_pending
        if self.hand_out.num_known is not None:
            known = np.minimum(known, self.hand_out.num_known)
        self._leave_unprepared()
        rows.restore(known)
        scheduler.restore(self._queued())
        for restore in self.extensions.restore:
            restore(list(self.requests.values()))
        failed = [
            (request, error) for request in list(self.requests.values()) if (error := self._resume(request)) is not None
        ]
        self.hand_out.num_known = None
        self.endings.fail(failed)
        return [request for request, _ in failed]

    def _leave_unprepared(self) -> None:
        """Have plugins forget the rows of requests that have ended or were not fully prepared."""
        for row, request in enumerate(self.scheduler.rows.requests):
            if request is None:
                continue
            ended = self.requests.get(request.request_id) is not request
            if ended or not request.joined:
                self.pipeline.release(row)
                for release in self.extensions.release:
                    release(row)
                self.scheduler.withdraw(request, ended=ended)

    def _queued(self) -> list[Request]:
        """Return the unfinished requests, without those that extensions still defer."""
        unfinished = list(self.requests.values())
        return [one for one in unfinished if not any(defer(one.leader or one) for defer in self.extensions.defer)]

    def _resume(self, request: Request) -> BaseException | None:
        """Restore the state that is derived from a request's tokens. Return the error if that fails."""
        request.finish_reason = request.stop_reason = None
        if request.row < 0:
            return None
        tokens = self.scheduler.rows.output_token_ids(request.row)
        self._take_back(request, tokens)
        try:
            for resume in self.extensions.resume:
                resume(request, tokens)
        except Exception as error:  # a plugin's code may raise anything
            logger.exception("request %r could not be restored", request.request_id)
            return error
        return None

    def _take_back(self, request: Request, tokens: list[int]) -> None:
        """Make text and log-probabilities those of the output `tokens`."""
        if request.detokenizer is not None and self.tokenizer is not None:
            detokenizer = self.tokenizer.detokenizer(request.known_prompt, request.params)
            for token in tokens:
                detokenizer.append(token, may_stop=False)  # none of them completed a stop string
            request.detokenizer = detokenizer
        if request.logprobs is not None:
            del request.logprobs[len(tokens) :]
