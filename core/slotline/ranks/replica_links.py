"""The front's connections with its replicas: processes, messages, and what ends them.

Each replica has one connection of Python's multiprocessing, over a socket of the machine. A thread of the front's reads
it, so that the end of a replica is known at once.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from typing import Any

import psutil
from attrs import define, field

from slotline.planner.experts import replicas_share_experts
from slotline.ranks.launch import Launched, environment_with, packed, start_programs
from slotline.ranks.messages import pickled
from slotline.ranks.reports import ADDRESS, NUMBER, Abort, Add, Answer, Batch, Call, Failed, Load, Ready, Report
from slotline.ranks.sharing import open_meeting_place
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import RankError, SlotlineError

_LOOK = 0.5
"""Seconds between two looks at processes that have not connected."""
_SETTLE = 2.0
"""Seconds to wait for the exit code of a process whose connection has ended."""


@define(eq=False)
class ReplicaLink:
    """A replica, as the front knows it.

    Attributes:
        ready: what it said when its engine was built.
        load: of its last report.
        last: time of its last report, or of what woke it after that.
        busy: whether it may have something to do.
        paused: whether it waits, since an error escaped from its last step.
    """

    number: int
    connection: Connection
    sending: threading.Lock = field(factory=threading.Lock)
    ready: Future[Ready] = field(factory=Future)
    load: Load = Load()
    last: float = field(factory=time.monotonic)
    paused: bool = False
    busy: bool = False
    sent: int = 0
    open: dict[int, Future[None]] = field(factory=dict)


class ReplicaLinks:
    """The front's connections.

    Args:
        loaded: the configuration.
        digest: of the plan that all replicas must have.
        start: starts the replicas, which connect to an address. None for processes.

    Attributes:
        replicas: in order of their numbers.
        error: what ended them all, None while they run.
        refused: keys of requests that replicas refused, with the errors, until they are taken out.

    Raises:
        ConfigError: if the configuration cannot be sent to another process.
        RankError: if a replica cannot be started.
        SlotlineError: what a replica raised while it built its engine.
    """

    def __init__(
        self, loaded: LoadedConfig, digest: str, start: Callable[[LoadedConfig, str], Launched] | None = None
    ) -> None:
        self._parallel = loaded.config.parallel
        self.replicas: list[ReplicaLink] = []
        self.error: SlotlineError | None = None
        self._process, self._closed, self._ending = os.getpid(), False, threading.Lock()
        self.refused: deque[tuple[int, BaseException]] = deque()
        self._reports: deque[tuple[ReplicaLink, Report]] = deque()
        self._told = threading.Event()
        self._answers: dict[int, tuple[ReplicaLink, Future[Any]]] = {}
        self._number = 0
        self._shared = open_meeting_place(loaded) if replicas_share_experts(loaded) else None
        data, key = packed(loaded), secrets.token_bytes(32)
        with Listener(None, backlog=self._parallel.data, authkey=key) as listener:
            self._launched = (start or start_processes)(loaded, pickle.dumps((listener.address, key)).hex())
            try:
                self._accept(listener)
            except BaseException:
                self._launched.end()
                raise
        try:
            for one in self.replicas:
                one.connection.send_bytes(data)
                if self._shared is not None:
                    one.connection.send_bytes(pickle.dumps(self._shared.address))
                threading.Thread(target=self._receive, args=(one,), name="slotline-front", daemon=True).start()
            self._await_ready(digest)
        except BaseException:
            self.close()
            raise

    def close(self, patience: float = 0.0) -> None:
        """End all replicas, after this many seconds in which they may end by themselves."""
        with self._ending:
            if self._closed or os.getpid() != self._process:
                return
            self._closed = True
        for one in self.replicas:
            _shut(one.connection)
        self._launched.end(patience)

    def send(self, replica: ReplicaLink, asked: Sequence[Add | Abort | Call]) -> None:
        """Send what a replica is asked to do, in order.

        Raises:
            Exception: if it cannot be pickled. Nothing is sent then.
        """
        with replica.sending:
            data = pickled(Batch(replica.sent + 1, asked))
            replica.sent += 1
            if any(isinstance(one, Add) for one in asked):
                replica.open[replica.sent] = Future()
            replica.paused = False
            if not replica.busy:
                replica.busy, replica.last = True, time.monotonic()
            try:
                replica.connection.send_bytes(data)
            except OSError:
                self._lost(replica)

    def unchecked(self) -> list[Future[None]]:
        """Return futures of the batches with requests that replicas have not checked."""
        return [future for one in self.replicas for future in tuple(one.open.values())]

    def call(
        self, function: Callable[..., Any], *given: Any, reads: bool = False, only: int | None = None
    ) -> list[Future[Any]]:
        """Have all replicas, or one, call a function of a module with their engines. See `Call`."""
        futures = []
        for one in self.replicas if only is None else [self.replicas[only]]:
            future: Future[Any] = Future()
            futures.append(future)
            with self._ending:
                self._number += 1
                number = self._number
                self._answers[number] = one, future
            try:
                self.send(one, [Call(number, function, given, reads)])
            except BaseException:
                self._answers.pop(number, None)
                raise
            if self.error is not None:
                self._fail_futures(self.error)
        return futures

    def wake(self) -> None:
        """Have `wait` return."""
        self._told.set()

    def wait(self, timeout: float) -> None:
        """Wait until there are reports, so many seconds at most. It may return early."""
        self._told.wait(timeout)
        self._told.clear()

    def take(self) -> list[tuple[ReplicaLink, Report]]:
        """Return the reports that have come, each once."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def look(self, busy: Sequence[int]) -> None:
        """End the replicas if one of those with unfinished requests is stopped, or has said nothing for too long.

        Replicas that share experts have work whenever one of them has.
        """
        for one in self.replicas:
            works = one.number in busy
            if not works and not (busy and self._shared is not None):
                continue
            if one.paused:
                one.last = time.monotonic()
            elif _stopped(self._launched.pid_of(one.number)):
                self.fail(one, "its process was stopped by a signal")
            elif works and time.monotonic() - one.last > self._parallel.timeout:
                self.fail(one, f"it gave no sign of life for {self._parallel.timeout:g} s")

    def fail(self, replica: ReplicaLink, what: str, cause: BaseException | None = None) -> None:
        """End all replicas for the failure of one."""
        error = RankError(
            f"replica {replica.number} failed: {what}",
            fix="all replicas have ended: mend what the error names, and build the engine again",
        )
        error.__cause__ = cause
        self._end(error)

    def _end(self, error: SlotlineError) -> None:
        with self._ending:
            if self._closed or self.error is not None:
                return
            self.error = error
        self.close()
        self._fail_futures(error)
        self.wake()

    def _fail_futures(self, error: BaseException) -> None:
        with self._ending:
            waiting: list[Future[Any]] = [future for _, future in self._answers.values()]
            self._answers.clear()
        for one in self.replicas:
            waiting += [one.ready, *one.open.values()]
            one.open.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def _accept(self, listener: Listener) -> None:
        """Wait for all replicas to connect.

        Raises:
            RankError: if one ends, or does not connect in time.
        """
        found: dict[int, Connection] = {}
        until = time.monotonic() + self._parallel.start_timeout
        listener._listener._socket.settimeout(_LOOK)  # type: ignore[attr-defined]
        while len(found) < self._parallel.data:
            try:
                connection = listener.accept()
            except TimeoutError:
                if (ended := self._launched.ended()) is not None:
                    raise RankError(ended, fix="read its error above") from None
                if time.monotonic() > until:
                    raise self._late([n for n in range(self._parallel.data) if n not in found]) from None
                continue
            found[connection.recv()] = connection
        self.replicas = [ReplicaLink(number, connection) for number, connection in sorted(found.items())]

    def _await_ready(self, digest: str) -> None:
        """Wait until all engines are built.

        Raises:
            SlotlineError: what a replica raised.
            RankError: if one ends, is late, or has another plan.
        """
        until = time.monotonic() + self._parallel.start_timeout
        for one in self.replicas:
            try:
                ready = one.ready.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                raise self._late([other.number for other in self.replicas if not other.ready.done()]) from None
            if ready.digest != digest:
                raise RankError(
                    f"the plan of replica {one.number} is {ready.digest} and that of the front {digest}",
                    fix="give all replicas the same devices, files and packages",
                )
            one.load = ready.load

    def _late(self, missing: list[int]) -> RankError:
        return RankError(
            f"replicas {missing} did not start within {self._parallel.start_timeout:g} s",
            fix="raise parallel.start_timeout",
        )

    def _receive(self, replica: ReplicaLink) -> None:
        """Read what a replica says until its connection ends."""
        while True:
            try:
                message = pickle.loads(replica.connection.recv_bytes())
            except (EOFError, OSError):
                break
            replica.last = time.monotonic()
            if isinstance(message, Report):
                self._reported(replica, message)
            elif isinstance(message, Answer):
                with self._ending:
                    _, future = self._answers.pop(message.number, (None, None))
                if future is not None and message.error is not None:
                    future.set_exception(message.error)
                elif future is not None:
                    future.set_result(message.value)
            elif isinstance(message, Ready):
                replica.ready.set_result(message)
            elif isinstance(message, Failed):
                if isinstance(message.error, SlotlineError) and not replica.ready.done():
                    self._end(message.error)
                else:
                    self.fail(replica, f"it raised {type(message.error).__name__}", message.error)
        self._lost(replica)

    def _reported(self, replica: ReplicaLink, report: Report) -> None:
        replica.load = report.load
        if report.raised is not None:
            replica.paused = True
        replica.busy = bool(report.load.running or report.load.waiting)
        self.refused += report.refused
        self._reports.append((replica, report))
        self._told.set()
        for number in [one for one in tuple(replica.open) if one <= report.handled]:
            future = replica.open.pop(number)
            if not future.done():
                future.set_result(None)

    def _lost(self, replica: ReplicaLink) -> None:
        """End all replicas, since the connection of one has ended."""
        if self._closed:
            return
        until = time.monotonic() + _SETTLE
        while (text := self._launched.exit_of(replica.number)) is None and time.monotonic() < until:
            time.sleep(0.01)
        self.fail(replica, f"its process has ended{f': {text}' if text else ''}")

    def pid_of(self, number: int) -> int:
        """Return the id of a replica's process."""
        return self._launched.pid_of(number)


def start_processes(loaded: LoadedConfig, address: str) -> Launched:
    """Start the process of each replica. They share the cores of the machine."""
    count = loaded.config.parallel.data
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count))
    environments = {
        number: environment_with(**{ADDRESS: address, NUMBER: str(number), "OMP_NUM_THREADS": threads})
        for number in range(count)
    }
    return start_programs("slotline.ranks.replica", environments, "replica", 0)


def _shut(connection: Connection) -> None:
    """End a connection that another thread reads."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as opened:
        opened.shutdown(socket.SHUT_RDWR)


def _stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
