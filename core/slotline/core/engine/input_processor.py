"""Requests coming in: checked before they take anything, then queued, or kept until an extension is ready for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from attrs import define

from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.request import Request
from slotline.core.sampling.logits_processors import ProcessorPipeline
from slotline.core.scheduler.admission import (
    EngineLimits,
    check_capacity,
    check_common_capacity,
    check_inputs,
    check_request,
)
from slotline.core.scheduler.scheduler import Scheduler
from slotline.registry.errors import RequestError
from slotline.text.tokenizer import Tokenizer


@define(kw_only=True, eq=False)
class InputProcessor:
    """Checks requests and puts them into the scheduler's queue.

    Attributes:
        requests: the unfinished requests by id. This class adds them, and `RequestFinalizer` takes them out.
        arrivals: number of requests so far.
    """

    requests: dict[str, Request]
    scheduler: Scheduler
    limits: EngineLimits
    tokenizer: Tokenizer | None
    pipeline: ProcessorPipeline
    extensions: Extensions = NO_EXTENSIONS
    arrivals: int = 0

    def add(self, request: Request, *, stream: bool) -> None:
        """Check a request and queue it, with its followers. The text of a `stream` is read while it runs.

        Raises:
            RequestError: naming the error. Nothing is queued then.
        """
        check_inputs(request, self.extensions.inputs, self.limits)
        self._validate(request)
        params = request.params
        others = [other for follow in self.extensions.followers for other in follow(request)]
        self._validate_followers(request, others)
        if self.tokenizer is not None and (params.stop or (stream and params.detokenize)):
            request.detokenizer = self.tokenizer.detokenizer(request.known_prompt, params)
        try:
            for one in (request, *others):
                self._enter(one)
                self.requests[one.request_id] = one
            if not any(defer(request) for defer in self.extensions.defer):
                self._queue(request)
        except BaseException:
            self._withdraw(request)
            raise
        self.arrivals += 1 + len(others)

    def queue_ready(self, requests: Sequence[Request]) -> None:
        """Queue requests that an extension had deferred."""
        for request in requests:
            self._queue(request)

    def _validate(self, request: Request) -> None:
        check_request(request, self.limits, has_tokenizer=self.tokenizer is not None)
        if request.request_id in self.requests:
            raise RequestError(
                f"request id {request.request_id!r} is in use", fix="use another id, or wait for the first to end"
            )
        check_capacity(request, self.scheduler.cache, self.limits.max_model_len)
        self.scheduler.validate(request)
        self.pipeline.validate(request)
        for validate in self.extensions.validate:
            validate(request)

    def _validate_followers(self, request: Request, others: Sequence[Request]) -> None:
        """Check the requests that are computed together with one."""
        for other in others:
            try:
                self._validate(other)
            except RequestError as error:
                raise RequestError(f"{other.role}: {error.message}", fix=error.fix) from error
        if others:
            check_common_capacity((request, *others), self.scheduler.cache)

    def _enter(self, request: Request) -> None:
        """Let the extensions take what a request needs. If one refuses it, those before it give theirs back."""
        with ExitStack() as taken:
            for enter, leave in self.extensions.enter:
                enter(request)
                taken.callback(leave, request)
            taken.pop_all()

    def _queue(self, request: Request) -> None:
        """Queue a request, and those that are computed with it."""
        for one in (request, *self.extensions.all_linked(request)):
            self.scheduler.add(one)

    def _withdraw(self, request: Request) -> None:
        """Take out a request that could not be queued, and those that are computed with it."""
        for one in (request, *self.extensions.all_linked(request)):
            if self.requests.get(one.request_id) is one:
                del self.requests[one.request_id]
                self.scheduler.remove(one)
                for leave in self.extensions.leave:
                    leave(one)
