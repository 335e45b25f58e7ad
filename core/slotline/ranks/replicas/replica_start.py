"""Start of replicas' processes, until they have connected with the front."""

from __future__ import annotations

import os
import pickle
import secrets
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener

from slotline.kernels.cpu_threads import cores
from slotline.ranks.launch import Launched, environment_with, start_programs
from slotline.ranks.replicas.reports import ADDRESS, NUMBER
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import RankError

Start = Callable[[LoadedConfig, int, str], Launched]
"""Starts the replica of a number, which connects to an address."""
_LOOK = 0.5
"""Seconds between two looks at processes that have not connected."""


def connect_replicas(
    numbers: Sequence[int], start: Callable[[int, str], Launched], timeout: float
) -> dict[int, Connection]:
    """Start replicas, and return a connection with each by its number.

    Args:
        start: starts the replica of a number, which connects to an address.
        timeout: seconds.

    Raises:
        RankError: if one cannot be started, ends, or does not connect in time. The caller ends the others.
    """
    key = secrets.token_bytes(32)
    with Listener(None, backlog=max(1, len(numbers)), authkey=key) as listener:
        address = pickle.dumps((listener.address, key)).hex()
        launched = [start(number, address) for number in numbers]
        return _accept(listener, numbers, launched, timeout)


def start_process(loaded: LoadedConfig, number: int, address: str) -> Launched:
    """Start the process of a replica. All replicas share the cores of the machine.

    Raises:
        RankError: if it cannot be started.
    """
    count = loaded.config.parallel.data
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores().usable // count))
    environment = environment_with(**{ADDRESS: address, NUMBER: str(number), "OMP_NUM_THREADS": threads})
    return start_programs("slotline.ranks.replicas.replica", {0: environment}, "replica", number)


def late(missing: Sequence[int], timeout: float) -> RankError:
    """Return the error for replicas that did not start in time."""
    return RankError(f"replicas {list(missing)} did not start within {timeout:g} s", fix="raise parallel.start_timeout")


def _accept(
    listener: Listener, numbers: Sequence[int], launched: Sequence[Launched], timeout: float
) -> dict[int, Connection]:
    """Wait for all replicas to connect."""
    found: dict[int, Connection] = {}
    until = time.monotonic() + timeout
    listener._listener._socket.settimeout(_LOOK)  # type: ignore[attr-defined]
    while len(found) < len(numbers):
        try:
            connection = listener.accept()
        except TimeoutError:
            if (ended := next(filter(None, (one.ended() for one in launched)), None)) is not None:
                raise RankError(ended, fix="read its error above") from None
            if time.monotonic() > until:
                raise late([number for number in numbers if number not in found], timeout) from None
            continue
        found[connection.recv()] = connection
    return found
