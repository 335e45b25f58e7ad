"""Links of rank 0 with the other ranks: what it tells them, and the signs of life that they send.

Each rank has two connections to rank 0, of Python's multiprocessing: one for the log of arrivals, read by the rank's
main thread, and one for signs, which a thread of its own sends and reads. A closed connection tells of a dead process
at once.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import psutil
from attrs import define, field, frozen

from slotline.ranks.group import RankGroup
from slotline.registry.errors import RankError

BEAT = 0.5
"""Seconds between two signs of life."""
GRACE = 2.0
"""Seconds that rank 0 has to raise the error that another rank raised in the same step."""
_SETTLE = 0.3
"""Seconds after a first failure in which others are collected, so that the cause is named and not what it caused."""
_ADDRESS = "slotline/links"
_TRANSPORT = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "closed by peer")


@define(eq=False)
class _Follower:
    """Another rank, as rank 0 knows it.

    Attributes:
        step: number of the last step that it began.
        last: time of its last sign.
        raised: numbers of steps with the errors that it raised in them.
    """

    rank: int
    pid: int
    host: str
    log: Connection
    signs: Connection
    step: int = 0
    last: float = field(factory=time.monotonic)
    raised: dict[int, str] = field(factory=dict)
    stack: str = ""
    gone: bool = False


@frozen
class _Failure:
    """One failure. Those of a lower order are causes, those of a higher one may be effects."""

    order: int
    rank: int
    step: int
    what: str
    details: str = ""


class Links:
    """Rank 0's connections. A thread watches the other ranks.

    Attributes:
        failed: set once a rank has failed.
        step: number of the step that rank 0 is in, or has ended.
        within: whether rank 0 is in a step.
    """

    def __init__(self, group: RankGroup, timeout: float, host: str = "127.0.0.1") -> None:
        self._timeout, self._size = timeout, group.place.size
        self.failed = threading.Event()
        self.step, self.within = 0, False
        self.building = True
        self._since = time.monotonic()
        self._closed = False
        self._error: RankError | None = None
        self._on_failure: list[Callable[[], Any]] = []
        key = secrets.token_bytes(32)
        self._listener = Listener(("127.0.0.1" if host == "127.0.0.1" else "", 0), backlog=2 * self._size, authkey=key)
        group.store.set(_ADDRESS, pickle.dumps((host, self._listener.address[1], key)).hex())
        self.followers: list[_Follower] = []

    def accept(self, alive: Callable[[], str | None], timeout: float) -> None:
        """Wait for all ranks to connect.

        Args:
            alive: returns what happened if a rank has ended before it connected.

        Raises:
            RankError: if one ends, or does not connect in time.
        """
        found: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + timeout
        self._listener._listener._socket.settimeout(BEAT)  # type: ignore[attr-defined]
        while len(found) < self._size - 1 or not all({"log", "signs"} <= parts.keys() for parts in found.values()):
            try:
                connection = self._listener.accept()
            except TimeoutError:
                if (ended := alive()) is not None:
                    raise RankError(ended, fix="read its error above") from None
                if time.monotonic() > until:
                    missing = [rank for rank in range(1, self._size) if len(found.get(rank, {})) < 2]
                    raise RankError(
                        f"ranks {missing} did not start within {timeout:g} s", fix="raise parallel.start_timeout"
                    ) from None
                continue
            hello = connection.recv()
            found.setdefault(hello["rank"], {"hello": hello})[hello["what"]] = connection
        self._listener.close()
        self.followers = [
            _Follower(rank, p["hello"]["pid"], p["hello"]["host"], p["log"], p["signs"])
            for rank, p in sorted(found.items())
        ]
        threading.Thread(target=self._watch, name="slotline-ranks", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message of the log to all ranks."""
        for follower in self.followers:
            try:
                follower.log.send_bytes(message)
            except OSError:
                self.fail(0, follower, "its process has ended")

    def begin_step(self) -> None:
        """Note that rank 0 begins a step."""
        self.step += 1
        self._since, self.within = time.monotonic(), True

    def end_step(self) -> None:
        """Note that rank 0 has ended a step without an error."""
        self.within = False

    def on_failure(self, call: Callable[[], Any]) -> None:
        """Have a call made when a rank has failed, from the watching thread."""
        self._on_failure.append(call)

    def refuse_failed(self) -> None:
        """Raise the error of a rank that has failed.

        Raises:
            RankError: naming the rank.
        """
        if self.failed.is_set():
            raise self.error()

    def error(self, patience: float = 5.0) -> RankError:
        """Return the error that ended the engine, once it is known."""
        self.failed.wait(patience)
        return self._error or RankError("the ranks have lost each other", fix="build the engine again")

    def all_raised(self, step: int) -> bool:
        """Wait a while, and return whether every rank raised an error in a step, as rank 0 did."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until and not self.failed.is_set():
            if all(step in follower.raised for follower in self.followers):
                for follower in self.followers:
                    follower.raised.clear()
                return True
            time.sleep(0.005)
        return False

    def close(self) -> None:
        """End the watch, and close the connections."""
        self._closed = True
        for follower in self.followers:
            for connection in (follower.log, follower.signs):
                with suppress(OSError):
                    connection.close()

    def _watch(self) -> None:
        failures: list[_Failure] = []
        first = 0.0
        while not self._closed:
            self._read(failures)
            if not self._closed:
                self._look(failures)
            if failures and not first:
                first = time.monotonic()
            if failures and time.monotonic() - first > _SETTLE:
                self._end(min(failures, key=lambda one: one.order))
                return

    def _read(self, failures: list[_Failure]) -> None:
        by: dict[Any, _Follower] = {one.signs: one for one in self.followers if not one.gone}
        try:
            ready: list[Any] = list(wait(list(by), BEAT / 5))
        except OSError:
            return
        for connection in ready:
            follower = by[connection]
            try:
                kind, step, text = connection.recv()
            except (EOFError, OSError):
                follower.gone = True
                if not self._closed:
                    failures.append(_Failure(0, follower.rank, follower.step, "its process has ended"))
                continue
            follower.step, follower.last = step, time.monotonic()
            if kind == "raised":
                follower.raised[step] = text
            elif kind == "stack":
                follower.stack = text
            elif kind == "failed":
                order = 2 if any(word in text for word in _TRANSPORT) else 1
                failures.append(_Failure(order, follower.rank, step, "it raised an error", text))

    def _look(self, failures: list[_Failure]) -> None:
        now = time.monotonic()
        for follower in self.followers:
            if follower.gone:
                continue
            if follower.host == socket.gethostname() and _stopped(follower.pid):
                failures.append(_Failure(0, follower.rank, follower.step, "its process was stopped by a signal"))
            elif now - follower.last > self._timeout and not self.building:
                failures.append(
                    _Failure(0, follower.rank, follower.step, f"it gave no sign of life for {self._timeout:g} s")
                )
            for step, text in list(follower.raised.items()):
                passed = step < self.step or not self.within  # rank 0 is past the step, without an error
                if passed or now - self._since > GRACE:
                    what = "it raised an error and rank 0 did not"
                    failures.append(_Failure(1, follower.rank, step, what, text))
        if self.within and now - self._since > self._timeout and not self.building:
            for follower in self.followers:
                with suppress(OSError):
                    follower.signs.send("stack")
            time.sleep(0.2)
            self._read(failures)
            behind = [one for one in self.followers if not one.gone]
            for follower in behind:
                failures.append(
                    _Failure(
                        3,
                        follower.rank,
                        follower.step,
                        f"step {self.step} takes longer than {self._timeout:g} s",
                        follower.stack,
                    )
                )

    def fail(self, order: int, follower: _Follower, what: str) -> None:
        """Note a failure that another thread found."""
        if not self.failed.is_set():
            self._end(_Failure(order, follower.rank, follower.step, what))

    def _end(self, failure: _Failure) -> None:
        if self._closed or self.failed.is_set():
            return
        details = f"\n{failure.details.rstrip()}" if failure.details else ""
        self._error = RankError(
            f"rank {failure.rank} failed in step {failure.step}: {failure.what}{details}",
            fix="all ranks have ended: mend what the error names, and build the engine again",
        )
        for follower in self.followers:
            with suppress(OSError):
                follower.signs.send(f"failed:{self._error.message}")
        self.failed.set()
        for call in self._on_failure:
            with suppress(Exception):
                call()


class Link:
    """Another rank's connections to rank 0. A thread sends signs of life.

    Attributes:
        step: number of the step that this rank is in, or has ended.
        failure: what rank 0 said of the end of the engine, "" while it runs.
    """

    def __init__(self, group: RankGroup, on_end: Callable[[], Any]) -> None:
        host, port, key = pickle.loads(bytes.fromhex(group.store.get(_ADDRESS).decode()))
        self.rank, self.step, self.failure = group.place.rank, 0, ""
        self._closed, self._on_end = False, on_end
        self._lock = threading.Lock()
        hello = {"rank": self.rank, "pid": os.getpid(), "host": socket.gethostname()}
        self.log = Client((host, port), authkey=key)
        self.log.send({**hello, "what": "log"})  # read before the next one is accepted
        self._signs = Client((host, port), authkey=key)
        self._signs.send({**hello, "what": "signs"})
        self._main = threading.main_thread().ident
        threading.Thread(target=self._beat, name="slotline-rank", daemon=True).start()

    def say(self, kind: str, text: str = "") -> None:
        """Tell rank 0 something."""
        with self._lock, suppress(OSError):
            self._signs.send((kind, self.step, text))

    def raised(self, error: BaseException) -> None:
        """Tell rank 0 that a step of this rank raised an error. The rank goes on if rank 0 raises it too."""
        self.say("raised", "".join(traceback.format_exception(error)))

    def failed(self, error: BaseException) -> None:
        """Tell rank 0 that this rank ends with an error."""
        self.say("failed", "".join(traceback.format_exception(error)))

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        for connection in (self.log, self._signs):
            with suppress(OSError):
                connection.close()

    def _beat(self) -> None:
        while not self._closed:
            self.say("alive")
            try:
                while self._signs.poll(BEAT):
                    self._hear(self._signs.recv())
            except (EOFError, OSError):
                break
        if not self._closed:
            self.failure = self.failure or "rank 0 has ended"
            self._on_end()

    def _hear(self, said: str) -> None:
        if said == "stack":
            frame = sys._current_frames().get(self._main or 0)
            self.say("stack", "".join(traceback.format_stack(frame)))
        elif said.startswith("failed:"):
            self.failure = said.removeprefix("failed:")


def _stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
