"""Links of rank 0 with the other ranks: what it tells them, and the signs of life that they send.

Each rank has two connections to rank 0, of Python's multiprocessing: one for the log of arrivals, read by the rank's
main thread, and one for signs, which a thread of its own sends and reads. A closed connection tells of a dead process
at once. `Watch` finds failures from the signs.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from torch.distributed.distributed_c10d import Store

from slotline.ranks.group import RankGroup, waits_in
from slotline.ranks.stacks import lost_others, raised_text, stack_of, traceback_text
from slotline.ranks.watch import BEAT, Follower, Watch
from slotline.registry.errors import RankError
from slotline.registry.ranks import Place

_ADDRESS = "slotline/links"
_HERE = "127.0.0.1"


class Links:
    """Rank 0's connections.

    Attributes:
        watch: finds out about failures of ranks, in a thread.
        followers: the other ranks, once they are connected.
    """

    def __init__(self, store: Store, place: Place, timeout: float, start_timeout: float, host: str = _HERE) -> None:
        self._size, self._start_timeout = place.layout.replica_size, start_timeout
        self.watch = Watch(timeout, start_timeout)
        self.followers: list[Follower] = []
        key = secrets.token_bytes(32)
        self._listener = Listener((_HERE if host == _HERE else "", 0), backlog=2 * self._size, authkey=key)
        store.set(_ADDRESS, pickle.dumps((host, self._listener.address[1], key)).hex())

    @property
    def failed(self) -> threading.Event:
        """Set once a rank has failed."""
        return self.watch.failed

    def accept(self, alive: Callable[[], str | None]) -> None:
        """Wait for all ranks to connect.

        Args:
            alive: returns what happened if a rank has ended.

        Raises:
            RankError: if one ends, or does not connect in time.
        """
        self.watch.alive = alive
        found: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + self._start_timeout
        self._listener._listener._socket.settimeout(BEAT)  # type: ignore[attr-defined]
        while len(found) < self._size - 1 or not all({"log", "signs"} <= parts.keys() for parts in found.values()):
            try:
                connection = self._listener.accept()
                hello = connection.recv()
            except TimeoutError:
                self._refuse_absent(alive, found, until)
            except (AuthenticationError, EOFError, OSError):
                continue  # of another program
            else:
                without_delay(connection)
                found.setdefault(hello["rank"], {"hello": hello})[hello["what"]] = connection
        self._listener.close()
        self.followers = [
            Follower(rank, p["hello"]["pid"], p["hello"]["host"], p["log"], p["signs"])
            for rank, p in sorted(found.items())
        ]
        self.watch.begin(self.followers)

    def await_planned(self) -> None:
        """Wait until all ranks are about to join rank 0.

        Raises:
            RankError: if one fails before.
        """
        while not all(follower.planned for follower in self.followers):
            if self.failed.wait(0.005):
                raise self.error()

    def send(self, message: bytes) -> None:
        """Send a message of the log to all ranks. If one has ended, the watch finds out."""
        for follower in self.followers:
            with suppress(OSError):
                follower.log.send_bytes(message)

    def on_failure(self, call: Callable[[], Any]) -> None:
        """Have a call made when a rank has failed, from the watching thread."""
        self.watch.on_failure.append(call)

    def error(self, patience: float = 5.0) -> RankError:
        """Return the error that ended the engine, once it is known."""
        return self.watch.error(patience)

    def close(self) -> None:
        """End the watch, and close the connections. The other ranks are told, so that it is no failure."""
        self.watch.closed = True
        self._listener.close()
        for follower in self.followers:
            for connection in (follower.signs, follower.log):
                with suppress(OSError, ValueError):
                    if connection is follower.signs:
                        connection.send("closed")
                    connection.close()

    def _refuse_absent(self, alive: Callable[[], str | None], found: dict[int, dict[str, Any]], until: float) -> None:
        if (ended := alive()) is not None:
            raise RankError(ended, fix="read its error above")
        if time.monotonic() > until:
            missing = [rank for rank in range(1, self._size) if len(found.get(rank, {})) < 3]
            raise RankError(
                f"ranks {missing} did not start within {self._start_timeout:g} s",
                fix="raise parallel.start_timeout, or free the machine",
                rank=missing[0],
            )


class Link:
    """Another rank's connections to rank 0. A thread sends signs of life.

    Attributes:
        step: number of the step that this rank is in, or has ended.
        within: whether this rank is in a step.
        building: whether it builds its engine.
        on_end: called by the thread when rank 0 has ended, or has ended the engine for a failure.
        failure: what rank 0 said of the end of the engine, "" while it runs.
        group: all ranks, once this process has joined them.
    """

    def __init__(self, store: Store, rank: int, on_end: Callable[[], Any]) -> None:
        host, port, key = pickle.loads(bytes.fromhex(store.get(_ADDRESS).decode()))
        self.rank, self.step, self.within, self.building, self.failure = rank, 0, False, True, ""
        self.group: RankGroup | None = None
        self._closed, self.on_end = False, on_end
        self._lock = threading.Lock()
        hello = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
        self.log = self._connected((host, port), key, {**hello, "what": "log"})
        self._signs = self._connected((host, port), key, {**hello, "what": "signs"})
        self._thread = threading.get_ident()
        threading.Thread(target=self._beat, name="slotline-rank", daemon=True).start()

    def begin_step(self) -> None:
        """Note that this rank begins a step, in this thread."""
        self.step += 1
        self._thread, self.within = threading.get_ident(), True

    def planned(self) -> None:
        """Tell rank 0 that this rank is about to join the others."""
        self._say("planned")

    def failure_within(self, seconds: float) -> str:
        """Wait until rank 0 has said what ended the engine, and return it, "" if it says nothing."""
        until = time.monotonic() + seconds
        while not self.failure and time.monotonic() < until:
            time.sleep(0.01)
        return self.failure

    def raised(self, error: BaseException) -> None:
        """Tell rank 0 that a step of this rank raised an error. The rank goes on if rank 0 raises it too."""
        self._say("raised", self._described(error))

    def failed(self, error: BaseException) -> None:
        """Tell rank 0 that this rank ends with an error."""
        self._say("failed", self._described(error))

    def close(self) -> None:
        """Close the connections. Rank 0 is told, so that it is no failure."""
        if not self._closed:
            self._closed = True
            self._say("closed")
            for connection in (self.log, self._signs):
                with suppress(OSError):
                    connection.close()

    @staticmethod
    def _connected(address: tuple[str, int], key: bytes, hello: dict[str, Any]) -> Connection:
        connection = Client(address, authkey=key)
        without_delay(connection)
        connection.send(hello)  # read before the next one is accepted
        return connection

    def _say(self, kind: str, said: Any = None) -> None:
        with self._lock, suppress(OSError):
            self._signs.send((kind, self.step, said))

    def _described(self, error: BaseException) -> tuple[str, str, bool]:
        return raised_text(error), traceback_text(error), lost_others(error, waits_in(self.group))

    def _beat(self) -> None:
        while not self._closed:
            self._say("alive")
            try:
                while self._signs.poll(BEAT):
                    self._hear(self._signs.recv())
            except (EOFError, OSError):
                break
        if not self._closed:
            self.failure = self.failure or "rank 0 has ended"
            self.on_end()

    def _hear(self, said: str) -> None:
        if said == "stack":
            text, waits = stack_of(self._thread, waits_in(self.group))
            self._say("stack", (text, waits, self.within))
        elif said == "closed":
            self._closed, self.failure = True, "rank 0 has closed the engine"
        elif said.startswith("failed:"):
            self.failure, self._closed = said.removeprefix("failed:"), True
            self.on_end()


def without_delay(connection: Connection) -> None:
    """Have small messages sent at once, and not with the next one."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own, suppress(OSError):
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
