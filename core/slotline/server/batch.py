"""Batch files in OpenAI's format: a request a line in, an answer a line out. A batch that was ended goes on."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from attrs import field, frozen
from starlette.applications import Starlette
from starlette.types import Message

from slotline.llm.async_llm import AsyncLLM
from slotline.ranks.replicas.front import loads_of
from slotline.registry.errors import ConfigError
from slotline.server.app import build_app
from slotline.server.errors import HttpError
from slotline.server.keys import Keys
from slotline.server.run import build_state
from slotline.server.state import new_id

_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"})


@frozen
class BatchLine:
    """A request of a batch.

    Attributes:
        number: of its line, from 1.
        custom_id: names it in the answers.
        url: an endpoint's path.
        body: of the request.
        fault: what is wrong with the line, None if it can be sent.
    """

    number: int
    custom_id: str
    url: str = ""
    body: dict[str, Any] = field(factory=dict)
    fault: str | None = None


def read_batch(path: Path) -> list[BatchLine]:
    """Read the requests of a batch. A line that is wrong is kept with its fault, and gets an answer that says it.

    Raises:
        ConfigError: if the file cannot be read, or two requests have the same id.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}", fix="name a file with a request a line") from error
    lines = [_line(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    seen: dict[str, int] = {}
    for line in lines:
        if line.custom_id in seen:
            raise ConfigError(
                f"{path}: lines {seen[line.custom_id]} and {line.number} have custom_id {line.custom_id!r}",
                fix="give each request an id of its own, by which its answer is found",
            )
        seen[line.custom_id] = line.number
    return lines


def _line(number: int, text: str) -> BatchLine:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BatchLine(number, f"line-{number}", fault=f"line {number} is no JSON: {error}")
    if not isinstance(given, dict) or not isinstance(given.get("custom_id"), str):
        return BatchLine(number, f"line-{number}", fault=f"line {number} has no custom_id")
    custom_id, url, body = given["custom_id"], given.get("url"), given.get("body")
    fault = None
    if given.get("method", "POST") != "POST":
        fault = f"method {given['method']!r} is not POST"
    elif url not in _PATHS:
        fault = f"url {url!r} is none of {', '.join(sorted(_PATHS))}"
    elif not isinstance(body, dict):
        fault = "body is no object"
    elif body.get("stream"):
        fault = "stream has no meaning in a batch"
    return BatchLine(number, custom_id, str(url), body if isinstance(body, dict) else {}, fault)


def answered(path: Path) -> frozenset[str]:
    """Return the ids of the answers that a file has. An answer that was cut off is removed from its end.

    Raises:
        ConfigError: if the file holds something else.
    """
    if not path.exists():
        return frozenset()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        found = frozenset(str(json.loads(line)["custom_id"]) for line in whole.splitlines() if line.strip())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is no file of answers", fix="name another file, or remove it") from error
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return found


async def run_batch(llm: AsyncLLM, lines: list[BatchLine], out: IO[bytes], done: Callable[[], None]) -> int:
    """Answer requests and write each answer as it comes. Return the number of those that failed.

    Args:
        lines: the requests.
        out: gets an answer a line, whole and on the disk before the next is written.
        done: called after each answer.
    """
    app = build_app(build_state(llm), Keys((), ()))
    waiting, failed = iter(lines), 0

    async def work() -> None:
        nonlocal failed
        for line in waiting:
            answer = await _answer(app, line)
            failed += answer["error"] is not None or answer["response"]["status_code"] != 200
            out.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
            done()

    places = sum(load.most_running for load in loads_of(llm.front))
    most = max(1, min(len(lines), 2 * places, llm.loaded.config.server.max_unfinished))
    await asyncio.gather(*(work() for _ in range(most)))
    return failed


async def _answer(app: Starlette, line: BatchLine) -> dict[str, Any]:
    """Return the line of an answer."""
    answer: dict[str, Any] = {"id": new_id("batch_req"), "custom_id": line.custom_id, "response": None, "error": None}
    if line.fault is not None:
        return answer | {"error": {"code": "invalid_line", "message": line.fault}}
    status, body = await _call(app, line.url, json.dumps(line.body).encode())
    return answer | {"response": {"status_code": status, "request_id": answer["id"], "body": json.loads(body)}}


async def _call(app: Starlette, path: str, body: bytes) -> tuple[int, bytes]:
    """Return status and body of the application's answer to a request."""
    status, parts, sent = 500, list[bytes](), _once(body)

    async def receive() -> Message:
        if (message := next(sent, None)) is not None:
            return message
        await asyncio.Event().wait()  # nobody goes away
        raise HttpError(499, "the client has gone")

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    return status, b"".join(parts)


def _once(body: bytes) -> Iterator[Message]:
    yield {"type": "http.request", "body": body, "more_body": False}
