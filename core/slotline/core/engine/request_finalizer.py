"""Requests ending: every plugin lets go of them, their rows are free, and their text is whole."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from attrs import define

from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.request import Request, Status
from slotline.core.engine.stop_checker import StopChecker
from slotline.core.sampling.logits_processors import ProcessorPipeline
from slotline.core.scheduler.scheduler import Scheduler
from slotline.registry.attribution import BuiltPlugins
from slotline.text.tokenizer import Tokenizer


@define(kw_only=True, eq=False)
class RequestFinalizer:
    """Ends requests, whether they run or wait.

    Attributes:
        requests: the unfinished requests by id, as `InputProcessor` added them. This class takes them out.
        plugins: used to trace errors to plugins.
    """

    requests: dict[str, Request]
    scheduler: Scheduler
    stops: StopChecker
    tokenizer: Tokenizer | None
    pipeline: ProcessorPipeline
    plugins: BuiltPlugins
    extensions: Extensions = NO_EXTENSIONS

    def finish(self, requests: Sequence[Request], reasons: Sequence[str], causes: Sequence[str | int | None]) -> None:
        """End requests, each with a finish reason and its cause, and the requests that end with them."""
        if not requests:
            return
        now = monotonic()
        ending = self._with_linked(requests, reasons, causes)
        for request, reason, cause in ending:
            request.finish_reason, request.stop_reason = reason, cause
            request.metrics.time_in_all = now - request.arrival_time
            self._release(request)
            self._finish_text(request)
            del self.requests[request.request_id]
            for leave in self.extensions.leave:
                leave(request)
        running = [request for request, _, _ in ending if request.status is Status.RUNNING]
        for request, _, _ in ending:
            if request.status is not Status.RUNNING:
                self.scheduler.remove(request)
        self.scheduler.remove_running(running)

    def fail(self, failed: Sequence[tuple[Request, BaseException]]) -> None:
        """End requests with finish reason `error`, unless they ended with another that failed."""
        for request, error in failed:
            if not request.finished:
                self.finish([request], ["error"], [self.plugins.described(error)])

    def _with_linked(
        self, requests: Sequence[Request], reasons: Sequence[str], causes: Sequence[str | int | None]
    ) -> list[tuple[Request, str, str | int | None]]:
        """Return requests that end, each with reason and cause, and the requests that must end with them."""
        ending = list(zip(requests, reasons, causes, strict=True))
        if not self.extensions.linked:
            return ending
        known = set(map(id, requests))
        for request, reason, cause in tuple(ending):
            for other in self.extensions.all_linked(request):
                if id(other) not in known:
                    ending.append((other, reason, cause))
                    known.add(id(other))
        ending.sort(key=lambda one: one[0].leader is not None)  # one without its leader can be told
        return ending

    def _release(self, request: Request) -> None:
        """Have plugins forget a request, and keep the tokens that its row holds."""
        if request.row >= 0:
            request.output_token_ids = self.scheduler.rows.output_token_ids(request.row)
            self.pipeline.release(request.row)
            for release in self.extensions.release:
                release(request.row)

    def _finish_text(self, request: Request) -> None:
        """Read the text of a request, or the rest of it if it was streamed."""
        detokenizer = request.detokenizer
        if detokenizer is None:
            if self.tokenizer is None or not request.params.detokenize:
                return
            detokenizer = self.tokenizer.detokenizer(request.known_prompt, request.params)
            tokens = request.output_token_ids
            for token in tokens[:-1] if self.stops.ends_outside_text(request) else tokens:
                detokenizer.append(token)
        if not isinstance(request.stop_reason, str):
            detokenizer.finish()
        request.text = detokenizer.text if request.params.detokenize else ""
