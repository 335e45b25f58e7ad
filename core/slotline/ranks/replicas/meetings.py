"""Meetings of replicas that share experts: all of them run a forward pass whenever one has tokens.

A replica calls a meeting before each forward pass of its requests: it sends each other replica a message, and waits for
one of each. A replica without work sends its own once it has got one, and then runs its experts for the others. So a
pass has the same number on all replicas, and none runs while no replica has work.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from attrs import define, field, frozen

from slotline.registry.errors import RankError

_FORM = struct.Struct("<qqq?")
EAGER = -1
"""Number of no captured shape: the pass runs eagerly."""


class Gathers(Protocol):
    """All replicas, as `slotline.ranks.group.RankGroup` has them."""

    @property
    def place(self) -> Any:
        """This replica's place."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all replicas, in order."""
        ...


@frozen
class Pass:
    """What a replica brings to a forward pass.

    Attributes:
        number: of the pass, from 1.
        tokens: number of tokens, 0 for a replica without work.
        shape: number of the captured shape that it would run alone, or `EAGER`. Without work it says nothing.
        leaves: whether the replica leaves after it, if all do.
    """

    number: int
    tokens: int
    shape: int = EAGER
    leaves: bool = False


@define(eq=False)
class Meetings:
    """This replica's part in the meetings.

    Attributes:
        number: of this replica.
        connections: with the other replicas, by their numbers.
        timeout: seconds to wait for another replica.
        called: is called by another thread when another replica waits for this one. It may be called in vain.
        passes: forward passes so far.
        all_leave: whether all replicas leave after the last of them.
    """

    number: int
    connections: Mapping[int, Connection]
    timeout: float
    called: Callable[[], None] = field(default=lambda: None)
    passes: int = field(default=0, init=False)
    all_leave: bool = field(default=False, init=False)
    _said: dict[int, SimpleQueue[Pass]] = field(init=False)
    _closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._said = {number: SimpleQueue() for number in self.connections}
        for number, connection in self.connections.items():
            name = f"slotline-meetings-{number}"
            threading.Thread(target=self._receive, args=(number, connection), name=name, daemon=True).start()

    @property
    def is_awaited(self) -> bool:
        """Whether another replica waits for this one."""
        return any(not said.empty() for said in self._said.values())

    def meet(self, tokens: int, shape: int = EAGER, *, leaves: bool = False) -> tuple[Pass, ...]:
        """Come to the next forward pass with all replicas. Return what each brings to it, in order.

        Args:
            tokens, shape, leaves: of this replica, as in `Pass`.

        Raises:
            RankError: if a replica does not come in time, or comes for another pass.
        """
        self.passes += 1
        own = Pass(self.passes, tokens, shape, leaves)
        message = _FORM.pack(own.number, own.tokens, own.shape, own.leaves)
        for connection in self.connections.values():
            with suppress(OSError):  # the front says why it has gone
                connection.send_bytes(message)
        found = {self.number: own}
        until = time.monotonic() + self.timeout
        for number, said in self._said.items():
            try:
                other = said.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                raise RankError(
                    f"replica {number} did not join forward pass {self.passes} within {self.timeout:g} s",
                    fix="see what it says, or raise parallel.timeout if steps may take that long",
                ) from None
            if other.number != self.passes:
                raise RankError(f"replica {number} is in forward pass {other.number} and not in {self.passes}")
            found[number] = other
        self.all_leave = all(one.leaves for one in found.values())
        return tuple(found[number] for number in sorted(found))

    def close(self) -> None:
        """Leave the others. No meeting follows."""
        self._closed = True
        for connection in self.connections.values():
            connection.close()

    def _receive(self, number: int, connection: Connection) -> None:
        while not self._closed:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError, TypeError):  # closed here or there
                return
            self._said[number].put(Pass(*_FORM.unpack(message)))
            self.called()


def join_meetings(group: Gathers, timeout: float) -> Meetings:
    """Connect with all replicas of a group, which do the same.

    Args:
        timeout: seconds to wait for another replica in a meeting.
    """
    own, size = group.place.rank, group.place.size
    key = group.gather(secrets.token_bytes(32))[0]
    found: dict[int, Connection] = {}
    with Listener(None, backlog=size, authkey=key) as listener:
        addresses = group.gather(listener.address)
        for number in range(own):
            found[number] = Client(addresses[number], authkey=key)
            found[number].send(own)
        while len(found) < size - 1:
            connection = listener.accept()
            found[connection.recv()] = connection
    return Meetings(own, dict(sorted(found.items())), timeout)
