"""A router in front of servers that prefill and servers that decode.

A prompt goes to a server that prefills, for one token. Then the request goes to a server that decodes, with what the
first one answered in `kv_transfer_params`, and its answer goes back as it comes. Whatever is wrong with the first part
only costs time: the second server computes the prompt then. All other requests go to the servers that decode.

Both servers may also be asked at once. Then the second one takes blocks while the first one computes others. It finds
the prompt by a name that both are told, under vLLM's key `transfer_id`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any
from uuid import uuid4

import httpx
import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from slotline.server.errors import HttpError
from slotline.server.http import error_response, json_response, read_body, until_disconnect

logger = logging.getLogger("slotline")
HANDED = ("/v1/completions", "/v1/chat/completions")
"""Endpoints whose prompts are computed elsewhere."""
_MOST = 256 * 2**20  # bytes of a body
_OWN = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding", "keep-alive"})
"""Headers of one connection, which are not passed on."""
_NOT_FIRST = (
    *("stream_options", "min_tokens", "logprobs", "top_logprobs", "best_of", "response_format"),
    *("structured_outputs", "kv_transfer_params"),
)
"""Fields of a request that are of no use for its first part."""


class Router:
    """The router, an ASGI application.

    Args:
        prefill, decode: URLs of the servers without a path. Each is taken in turn.
        timeout: seconds that the first part of a request may take.
        early: ask both servers at once, as soon as an answer has said where the first one hands out blocks.

    Attributes:
        counts: requests that were ``prefilled`` elsewhere, those ``alone`` whose prompt the second server computes
            since the first part went wrong, and those ``passed`` on as they are. `GET /route` shows them.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], timeout: float, *, early: bool = False) -> None:
        self._prefill, self._decode, self._timeout = cycle(prefill), cycle(decode), timeout
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10.0), limits=httpx.Limits(max_connections=None), trust_env=False
        )
        self._early, self._places = early, dict[str, dict[str, Any]]()  # where servers that prefill hand out blocks
        self.counts: Counter[str] = Counter(prefilled=0, alone=0, passed=0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. If the client goes away, what was asked for it is ended."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            body = await read_body(request, _MOST)
            await until_disconnect(receive, self._answer(request, body, send))
        except HttpError as error:
            await error_response(error)(scope, receive, send)

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        path, headers = request.url.path, _passed(request.headers)
        if path == "/route" and request.method == "GET":
            await json_response(dict(self.counts))(request.scope, request.receive, send)
            return
        if path in HANDED and (asked := _prompt_first(body)) is not None:
            url = next(self._prefill)
            if (place := self._places.get(url)) is not None:
                await self._both(request, headers, asked, url, place, send)
                return
            transfer = await self._first(url, path, headers, asked)
            self.counts["prefilled" if transfer else "alone"] += 1
            if transfer:
                body = msgspec.json.encode({**asked, "kv_transfer_params": transfer})
        else:
            self.counts["passed"] += 1
        await self._pass(request, headers, body, send)

    async def _both(
        self,
        request: Request,
        headers: Mapping[str, str],
        asked: Mapping[str, Any],
        url: str,
        place: Mapping[str, Any],
        send: Send,
    ) -> None:
        """Have a prompt computed, and pass the request on meanwhile. If the first part goes wrong, begin anew."""
        name, begun = uuid4().hex, asyncio.Event()
        transfer = {"do_remote_prefill": True, "do_remote_decode": False, **place, "transfer_id": name}
        body = msgspec.json.encode({**asked, "kv_transfer_params": transfer})
        first = asyncio.create_task(self._first(url, request.url.path, headers, asked, name))
        answer = asyncio.create_task(self._pass(request, headers, body, send, begun))
        try:
            await asyncio.wait((first, answer), return_when=asyncio.FIRST_COMPLETED)
            if not first.done() or first.result() or answer.done() or begun.is_set():
                self.counts["prefilled"] += 1
                await answer
                return
        finally:
            first.cancel()
            answer.cancel()
            await asyncio.gather(first, answer, return_exceptions=True)
        self.counts["alone"] += 1
        await self._pass(request, headers, msgspec.json.encode(asked), send)

    async def _first(
        self, url: str, path: str, headers: Mapping[str, str], asked: Mapping[str, Any], name: str = ""
    ) -> Any:
        """Have a prompt computed. Return what the answer says for the other server, None if it says nothing."""
        first = {name: value for name, value in asked.items() if name not in _NOT_FIRST}
        first |= {"max_tokens": 1, "stream": False, "n": 1}
        first |= {"max_completion_tokens": 1} if "max_completion_tokens" in asked else {}
        first["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        first["kv_transfer_params"] |= {"transfer_id": name} if name else {}
        try:
            answer = await self._client.post(url + path, json=first, headers=headers, timeout=self._timeout)
            if answer.status_code == 200:
                found = answer.json().get("kv_transfer_params")
                if self._early and found:
                    self._places[url] = {key: found.get(key) for key in ("remote_host", "remote_port")}
                return found
            logger.warning("%s did not compute a prompt: status %d, %.200s", url, answer.status_code, answer.text)
        except (httpx.HTTPError, ValueError) as error:
            self._places.pop(url, None)
            logger.warning("%s did not compute a prompt: %s %s", url, type(error).__name__, error)
        return None

    async def _pass(
        self,
        request: Request,
        headers: Mapping[str, str],
        body: bytes,
        send: Send,
        started: asyncio.Event | None = None,
    ) -> None:
        """Pass a request on, and its answer back as it comes. Set `started` with the first of it.

        Raises:
            HttpError: with status 502 if the server cannot be reached.
        """
        url = next(self._decode)
        target, begun = httpx.URL(url + request.url.path, query=request.url.query.encode()), False
        try:
            async with self._client.stream(request.method, target, content=body, headers=headers) as answer:
                names = [one for one in answer.headers.raw if one[0].lower().decode() not in _OWN]
                start = {"type": "http.response.start", "status": answer.status_code, "headers": names}
                if started is not None:
                    started.set()
                await send(start)
                begun = True
                async for part in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.HTTPError as error:
            if begun:
                raise  # the connection is cut, as that of the server was
            raise HttpError(
                502, f"{url} cannot be reached: {type(error).__name__} {error}", "server_error", code="unreachable"
            ) from error


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OWN}


def _prompt_first(body: bytes) -> dict[str, Any] | None:
    """Return a body whose prompt is of use to another server, None for one that is to be passed on as it is."""
    try:
        asked = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None  # the server says what is wrong with it
    if not isinstance(asked, dict) or asked.get("echo") or asked.get("prompt_logprobs") is not None:
        return None  # log-probabilities of a prompt need all of it
    return None if asked.get("kv_transfer_params") else asked
