"""From the steps of the engine's thread to the streams of an event loop, in one call of the loop a step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from attrs import define, field

from slotline.core.batch.request import Request
from slotline.core.engine.output_processor import StepResult
from slotline.llm.output_stream import Ending, OutputStream, Part, Update
from slotline.ranks.replicas.front import Front, refusal_of
from slotline.registry.errors import EngineFailedError, IntegrityError, SlotlineError
from slotline.registry.loading import one_line

logger = logging.getLogger("slotline")


@define(kw_only=True, eq=False)
class Delivery:
    """A request whose tokens go to a stream.

    Attributes:
        sent, scored: the tokens and log-probabilities that were sent.
        decoded: whether the engine decodes the tokens.
    """

    part: Part
    stream: OutputStream
    sent: int = 0
    scored: int = 0
    decoded: bool = field(default=False)


class Deliveries:
    """The requests of all streams. All methods but `close` and the properties belong to the engine's thread.

    Attributes:
        fatal: the error after which the engine takes no more requests. None while there was none.
        num_generated: tokens of all steps so far.
    """

    def __init__(self) -> None:
        self.fatal: BaseException | None = None
        self.num_generated = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._going: dict[Request, Delivery] = {}
        self._streams: set[OutputStream] = set()

    @property
    def num_streams(self) -> int:
        """Return the number of streams that have not ended."""
        return len(self._streams)

    def add(self, loop: asyncio.AbstractEventLoop, stream: OutputStream) -> None:
        """Deliver the tokens of a stream's requests from now on."""
        self._loop = loop
        self._streams.add(stream)
        for part in stream.parts:
            decoded = part.detokenizer is None and part.request.detokenizer is not None
            self._going[part.request] = Delivery(part=part, stream=stream, decoded=decoded)

    def hand_out(self, engine: Front, result: StepResult) -> None:
        """Send the tokens of a step, and the ends of requests."""
        self.num_generated += len(result.token_ids)
        new: dict[Delivery, list[int]] = {}
        going, holders = self._going, engine.rows.requests
        for row, token in zip(result.rows.tolist(), result.token_ids.tolist(), strict=True):
            delivery = going.get(holders[row])
            if delivery is not None:
                new.setdefault(delivery, []).append(token)
        updates = [self._update(delivery, token_ids) for delivery, token_ids in new.items()]
        self._send(updates + self._ended(engine))

    def fail(self, engine: Front, error: BaseException) -> None:
        """End every stream with the exception that escaped from a step, and abort the requests.

        The engine goes on after errors of our own kinds, as when memory ended. Any other, and a contradiction that
        the integrity checker found, or the failure of a rank, is the end of it.
        """
        if isinstance(error, EngineFailedError):
            self.fatal = error
            logger.critical("%s", error)
        elif not isinstance(error, SlotlineError) or isinstance(error, IntegrityError):
            error = self.fatal = _failed(error)
            logger.critical("the engine failed, and takes no more requests", exc_info=error)
        else:
            logger.error("a step failed, and the requests that ran with it: %s", error)
        try:
            for request_id in tuple(engine.requests):
                engine.abort(request_id)
        except BaseException as second:
            self.fatal = self.fatal or _failed(second)
            engine.requests.clear()  # nothing steps it again
            logger.critical("the engine failed again while its requests were aborted", exc_info=second)
        self.close(error)

    def abort(self, engine: Front, request_id: str) -> bool:
        """End the request of an id, and the other outputs of its prompt. Return False if there is none."""
        request = engine.requests.get(request_id)
        if request is None or request not in self._going:
            return False
        self._abort(engine, [part.request for part in self._going[request].stream.parts])
        return True

    def drop(self, engine: Front, group: Sequence[Request]) -> None:
        """Abort the requests of a stream that nobody reads any more."""
        for request in group:
            if (delivery := self._going.pop(request, None)) is not None:
                self._streams.discard(delivery.stream)
        self._abort(engine, group)

    def close(self, error: BaseException) -> None:
        """End every stream with an error."""
        streams, self._streams = self._streams, set()
        self._going.clear()
        for stream in streams:
            if not stream.ended:
                self._call(stream.fail, error)

    def _abort(self, engine: Front, group: Sequence[Request]) -> None:
        for request in group:
            if engine.requests.get(request.request_id) is request:
                engine.abort(request.request_id)
        self._send(self._ended(engine))

    @staticmethod
    def _update(delivery: Delivery, token_ids: list[int], ending: Ending | None = None) -> Update:
        """Return what is new of a request."""
        part = delivery.part
        request = part.request
        delivery.sent += len(token_ids)
        logprobs = text = None
        if request.logprobs is not None:
            logprobs = request.logprobs[delivery.scored : delivery.sent]
            delivery.scored += len(logprobs)
        if ending is not None and part.detokenizer is None:
            text = request.text
        elif delivery.decoded and request.detokenizer is not None:
            text = request.detokenizer.settled
        return Update(delivery.stream, part, token_ids, logprobs, text, ending)

    def _ended(self, engine: Front) -> list[Update]:
        """Return the ends of requests, whatever ended them. Nothing more is delivered to these."""
        updates = []
        for request in [one for one in self._going if one.finished]:
            delivery = self._going.pop(request)
            if (refusal := refusal_of(request)) is not None:
                self._streams.discard(delivery.stream)
                self._call(delivery.stream.fail, refusal)
                continue
            ending = Ending(
                reason=request.finish_reason,
                cause=request.stop_reason,
                outside_text=bool(request.output_token_ids) and engine.hand_out.stops.ends_outside_text(request),
            )
            updates.append(self._update(delivery, request.output_token_ids[delivery.sent :], ending))
            if all(part.request.finished for part in delivery.stream.parts):
                self._streams.discard(delivery.stream)
        return updates

    def _send(self, updates: list[Update]) -> None:
        if updates:
            self._call(_deliver, updates)

    def _call(self, function: object, *arguments: object) -> None:
        """Call a function on the loop, unless that is closed, with its readers."""
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]
            except RuntimeError:
                logger.debug("the event loop was closed")


def _failed(error: BaseException) -> EngineFailedError:
    if isinstance(error, EngineFailedError):
        return error
    failed = EngineFailedError(
        f"the engine failed: {one_line(error)}",
        fix="start it again, and report the traceback of the log",
    )
    failed.__cause__ = error
    return failed


def _deliver(updates: list[Update]) -> None:
    for update in updates:
        update.stream.put(update)
