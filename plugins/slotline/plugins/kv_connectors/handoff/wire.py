"""Messages between engines: a length in 4 bytes, and JSON. Blocks follow as they are."""

from __future__ import annotations

import json
import socket
from typing import Any

from slotline.plugins.kv_connectors.handoff.store import Key

VERSION = 4
LONGEST = 16 * 2**20
"""Bytes of a message at most, without the blocks."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message."""
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(4, "big") + data)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next message.

    Raises:
        OSError: if the connection ends, or none comes in time.
        ValueError: if it is none.
    """
    length = int.from_bytes(_exactly(connection, 4), "big")
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(_exactly(connection, length))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def fill(connection: socket.socket, buffer: memoryview) -> None:
    """Receive as many bytes as the buffer takes.

    Raises:
        OSError: if the connection ends, or none come in time.
    """
    while buffer:
        if not (count := connection.recv_into(buffer)):
            raise ConnectionError("the peer has gone")
        buffer = buffer[count:]


def named(keys: list[Key]) -> list[list[Any]]:
    """Return blocks in the form of a message."""
    return [[group, block_hash.hex()] for group, block_hash in keys]


def keys_of(found: Any) -> list[Key]:
    """Return blocks of a message.

    Raises:
        ValueError: if these are none.
    """
    try:
        return [(int(group), bytes.fromhex(one)) for group, one in found]
    except TypeError as error:
        raise ValueError(f"no blocks: {error}") from error


def _exactly(connection: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    fill(connection, memoryview(buffer))
    return bytes(buffer)
