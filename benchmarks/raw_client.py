"""A client of streams that costs little itself: requests as bytes on sockets that stay open, and times of what comes.

A response ends where its chunked body, or one whose length the head says, does. Nothing else of HTTP is read.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from selectors import EVENT_READ, DefaultSelector
from time import perf_counter
from typing import Any

from attrs import define, field

LAST_CHUNK = b"0\r\n\r\n"


@define(eq=False)
class Answer:
    """A response.

    Attributes:
        started: when its request was sent, in seconds of `perf_counter`.
        pieces: what was read from the socket.
        times: when each piece was.
    """

    started: float
    pieces: list[bytes] = field(factory=list)
    times: list[float] = field(factory=list)

    @property
    def status(self) -> int:
        """Return the status, 0 if nothing came."""
        return int(self.pieces[0].split(b" ", 2)[1]) if self.pieces else 0

    def body(self) -> bytes:
        """Return the body, without the lengths of its chunks."""
        head, _, rest = b"".join(self.pieces).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return rest
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            parts.append(rest[:length])
            rest = rest[length + 2 :]
        return b"".join(parts)

    def events(self) -> list[bytes]:
        """Return the events of the body as they were sent."""
        return [one + b"\n\n" for one in self.body().split(b"\n\n") if one]


class Connection:
    """A socket that sends one request after another.

    Attributes:
        answer: the response that is read, None while none is.
    """

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answer: Answer | None = None
        self._left: int | None = None

    def send(self, request: bytes) -> None:
        """Send a request. It has to fit into the socket's buffer."""
        self.answer, self._left = Answer(perf_counter()), None
        self.socket.sendall(request)

    def read(self) -> Answer | None:
        """Read what has come. Return the response once it is whole.

        Raises:
            ConnectionError: if the server closed the connection.
        """
        data, answer = self.socket.recv(1 << 20), self.answer
        if not data or answer is None:
            raise ConnectionResetError("the server closed the connection")
        answer.times.append(perf_counter())
        answer.pieces.append(data)
        if len(answer.pieces) == 1:
            self._left = _length(data)
        elif self._left is not None:
            self._left -= len(data)
        if data.endswith(LAST_CHUNK) if self._left is None else self._left <= 0:
            self.answer = None
            return answer
        return None

    def ask(self, request: bytes) -> Answer:
        """Send a request and return its response."""
        self.send(request)
        while (answer := self.read()) is None:
            pass
        return answer


def _length(head: bytes) -> int | None:
    """Return how many bytes of a body are still to come, None if it comes in chunks."""
    lines, _, body = head.partition(b"\r\n\r\n")
    for line in lines.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2]) - len(body)
    return None


def post(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """Return a POST request. A body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "localhost", "content-type": "application/json", "content-length": len(data), **(headers or {})}
    return "\r\n".join([f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), "", ""]).encode() + data


def ask_once(port: int, request: bytes) -> Answer:
    """Return the response to one request on a connection of its own."""
    connection = Connection(port)
    with connection.socket:
        return connection.ask(request)


def ask_for(seconds: float, port: int, clients: int, requests: Iterator[bytes]) -> list[Answer]:
    """Ask without a pause on so many connections for so long, and until as many responses have ended.

    Returns:
        The responses that ended within the time. What is under way then is awaited and left out.
    """
    answers: list[Answer] = []
    with ExitStack() as stack, DefaultSelector() as selector:

        def connect() -> Connection:
            connection = Connection(port)
            selector.register(stack.enter_context(connection.socket), EVENT_READ, connection)
            return connection

        end, going = perf_counter() + seconds, clients
        for connection in [connect() for _ in range(clients)]:
            connection.send(next(requests))
        while going:
            for key, _ in selector.select():
                connection = key.data
                try:
                    answer = connection.read()
                except ConnectionError:  # the server ends those that are idle for some seconds, as ours here may be
                    selector.unregister(connection.socket)
                    connection = connect()
                    connection.send(next(requests))
                    continue
                if answer is None:
                    continue
                if answer.times[-1] < end or len(answers) < clients:
                    answers.append(answer)
                    connection.send(next(requests))
                else:
                    going -= 1
    return answers
