"""Bodies in and answers out: limits, JSON, streams of events, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slotline.server.errors import HttpError, as_http_error

T = TypeVar("T")
Headers = Sequence[tuple[str, str]]
_ENCODER = msgspec.json.Encoder()
_LARGE = 256 * 1024
"""Bytes from which on JSON is read and written on another thread than the loop's."""
DONE = b"data: [DONE]\n\n"


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a request.

    Raises:
        HttpError: with status 413 if it has more than `most` bytes. The rest is not read. With status 499 if the client
            goes away before its end.
    """
    too_large = HttpError(413, f"the body has more than server.max_body, {most:,} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise too_large
    parts, length = [], 0
    try:
        async for part in request.stream():
            length += len(part)
            if length > most:
                raise too_large
            parts.append(part)
    except ClientDisconnect as error:
        raise HttpError(499, "the client has gone", code="client_gone") from error
    return b"".join(parts)


async def decode(body: bytes, kind: type[T]) -> T:
    """Return a body as an object of a kind. A whole number may be written with a point, as JSON schemas allow it.

    Raises:
        msgspec.DecodeError: if it is no JSON or not of this kind.
        HttpError: if it is empty.
    """
    if not body:
        raise HttpError(400, "the body is empty", code="invalid_json")
    try:
        if len(body) < _LARGE:
            return _decoded(body, kind)
        return await asyncio.to_thread(_decoded, body, kind)
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise HttpError(400, "the body is nested too deeply", code="invalid_json") from error


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    return msgspec.convert(_whole(msgspec.json.decode(body)), kind)


def _whole(value: Any) -> Any:
    """Return a value of JSON whose whole numbers are integers."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return {name: _whole(one) for name, one in value.items()} if isinstance(value, dict) else value


def encode(value: Any) -> bytes:
    """Return a value as JSON."""
    return _ENCODER.encode(value)


def event(value: Any) -> bytes:
    """Return a value as a server-sent event."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """Return a value as a server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + _ENCODER.encode(value) + b"\n\n"


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> Response:
    """Return a value as the answer."""
    return Response(encode(value), status, dict(headers), media_type="application/json")


def error_response(error: BaseException, *, anthropic: bool = False) -> Response:
    """Return the answer to an exception, in the form of the endpoint's clients."""
    known = as_http_error(error)
    return json_response(known.anthropic() if anthropic else known.openai(), known.status, known.headers)


class Begun(NamedTuple):
    """Events of which the first is there already.

    Attributes:
        first: None if there is none.
    """

    first: bytes | None
    rest: AsyncGenerator[bytes]


class EventStream(Response):
    """A stream of server-sent events. A client that goes away ends it.

    The first event is awaited before the answer begins, so that what is wrong with a request gets its status.

    Args:
        events: the events, as bytes.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Begun, headers: Headers = ()) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **dict(headers)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client has gone."""
        await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        first, events = self._events
        async with aclosing(events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            more = True
            if first is not None:
                more = not first.endswith(DONE)
                await send({"type": "http.response.body", "body": first, "more_body": more})
            async for data in events:
                more = not data.endswith(DONE)
                await send({"type": "http.response.body", "body": data, "more_body": more})
            if more:
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def begun(events: AsyncGenerator[bytes]) -> Begun:
    """Return events once the first one is there.

    Raises:
        Exception: what the first one raised.
    """
    return Begun(await anext(events, None), events)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what some work returns. If the client goes away first, the work is cancelled, and None is returned."""
    working = asyncio.current_task()
    assert working is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and working.uncancel() == 0:
            return None
        raise
    finally:
        watching.cancel()


async def gather_or_cancel(work: Sequence[Awaitable[T]]) -> list[T]:
    """Return the results of several works. If one fails, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
