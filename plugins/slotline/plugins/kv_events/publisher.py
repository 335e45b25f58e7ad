"""A thread that publishes batches over ZeroMQ, and sends those again that a subscriber asks for.

A message has three frames: the topic, the batch's number as 8 bytes, and the batch. A request for a replay has a number
as 8 bytes. Its answers are the batches from this number on, each with its number, and a last one with the number -1.
This is the protocol of vLLM's `ZmqEventPublisher`.
"""

from __future__ import annotations

import logging
from collections import deque
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any

import msgspec
import zmq

from slotline.plugins.kv_events.events import KVEventBatch
from slotline.registry.errors import ConfigError

logger = logging.getLogger("slotline")
END = (-1).to_bytes(8, "big", signed=True)
"""Number of the last answer to a request for a replay."""
_LOOK = 0.05  # seconds between two looks at requests for replays
_LINGER = 500  # milliseconds that the last messages may take after the end


class Publisher:
    """Publisher of batches, numbered from 0.

    Args:
        options: `KVEventsOptions`.
        number: of the replica, which is added to the ports.

    Raises:
        ConfigError: if an endpoint cannot be had.
    """

    def __init__(self, options: Any, number: int) -> None:
        self._number, self._topic = number, options.topic.encode()
        self._queue: Queue[tuple[float, list[Any]] | None] = Queue(options.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=options.buffer_steps)
        self._pub: Any = zmq.Context.instance().socket(zmq.PUB)
        self._pub.set_hwm(options.hwm)
        endpoint = endpoint_of(options.endpoint, number)
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        self._replay: Any = None
        try:
            _open(self._pub, endpoint, "endpoint", binds=binds)
            if options.replay_endpoint:
                self._replay = zmq.Context.instance().socket(zmq.ROUTER)
                _open(self._replay, endpoint_of(options.replay_endpoint, number), "replay_endpoint", binds=True)
        except ConfigError:
            self._end()
            raise
        self._thread = Thread(target=self._run, name="slotline-kv-events", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        """Return whether a batch can be given now."""
        return not self._queue.full()

    def publish(self, when: float, events: list[Any]) -> None:
        """Publish events soon. There is room for them."""
        self._queue.put_nowait((when, events))

    def close(self) -> None:
        """Publish what waits, and free the ports."""
        try:
            self._queue.put(None, timeout=1)
        except Full:
            return  # it ends with the process
        self._thread.join(timeout=2)

    def _run(self) -> None:
        encode, number = msgspec.msgpack.Encoder().encode, 0
        while True:
            if self._replay is not None and self._replay.poll(0):
                self._send_again(self._replay)
            try:
                given = self._queue.get(timeout=_LOOK)
            except Empty:
                continue
            if given is None:
                break
            batch, which = encode(KVEventBatch(*given, self._number)), number.to_bytes(8, "big")
            self._kept.append((which, batch))
            number += 1
            try:
                self._pub.send_multipart((self._topic, which, batch))
            except zmq.ZMQError:
                logger.exception("batch %d of kv_events was not published", number - 1)
        self._end()

    def _send_again(self, replay: Any) -> None:
        """Answer a request for a replay. One of another form is logged."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("kv_events got a request for a replay with frames of %s bytes", [len(one) for one in frames])
            return
        asker, _, first = frames
        for which, batch in [*self._kept, (END, b"")]:
            if which >= first:  # as numbers: both have 8 bytes, the highest first
                replay.send_multipart((asker, b"", which, batch))

    def _end(self) -> None:
        for one in (self._pub, self._replay):
            if one is not None:
                one.close(linger=_LINGER)


def endpoint_of(endpoint: str, number: int) -> str:
    """Return the endpoint of a replica: a port above that of the first one, or a name of its own."""
    if not number:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdecimal():
        return f"{address}:{int(port) + number}"
    return f"{endpoint}_dp{number}"


def _open(socket: Any, endpoint: str, key: str, *, binds: bool) -> None:
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"extensions.kv_events.{key} = {endpoint!r} cannot be had: {error}",
            fix="choose another address or port, or end the process that has it",
        ) from error
