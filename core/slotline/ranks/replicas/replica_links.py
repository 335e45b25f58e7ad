"""The front's connections with its replicas: messages, and what ends them.

Each replica has one connection of Python's multiprocessing, over a socket of the machine. A thread of the front's reads
it, so that the end of a replica is known at once.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
from attrs import define, field

from slotline.planner.experts import replicas_share_experts
from slotline.ranks.launch import Launched, packed
from slotline.ranks.messages import pickled
from slotline.ranks.replicas.replica_start import Start, connect_replicas, late, start_process
from slotline.ranks.replicas.reports import Abort, Add, Answer, Batch, Call, Failed, Load, Ready, Report
from slotline.ranks.replicas.sharing import MeetingAddress, open_meeting_place
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import RankError, SlotlineError

_SETTLE = 2.0
"""Seconds to wait for the exit code of a process whose connection has ended."""
_LEAVE = 2.0
"""Seconds that a replica has to answer what it was asked and to end, once it is not needed."""


@define(eq=False)
class ReplicaLink:
    """A replica, as the front knows it.

    Attributes:
        ready: what it said when its engine was built.
        load: of its last report.
        last: time of its last report, or of what woke it after that.
        busy: whether it may have something to do.
        paused: whether it waits, since an error escaped from its last step.
        joined: whether it takes requests. What happens to it before then ends no other replica.
        leaving: whether it is being ended.
        failure: what happened to it before it joined.
    """

    number: int
    connection: Connection
    sending: threading.Lock = field(factory=threading.Lock)
    ready: Future[Ready] = field(factory=Future)
    load: Load = Load()
    last: float = field(factory=time.monotonic)
    paused: bool = False
    busy: bool = False
    joined: bool = False
    leaving: bool = False
    failure: BaseException | None = None
    sent: int = 0
    open: dict[int, Future[None]] = field(factory=dict)


class ReplicaLinks:
    """The front's connections.

    Args:
        loaded: the configuration.
        digest: of the plan that all replicas must have.
        start: starts a replica, which connects to an address. None for processes.

    Attributes:
        replicas: in order of their numbers.
        error: what ended them all, None while they run.
        refused: keys of requests that replicas refused, with the errors, until they are taken out.

    Raises:
        ConfigError: if the configuration cannot be sent to another process.
        RankError: if a replica cannot be started.
        SlotlineError: what a replica raised while it built its engine.
    """

    def __init__(self, loaded: LoadedConfig, digest: str, start: Start | None = None) -> None:
        self._parallel = loaded.config.parallel
        self._start = start or start_process
        self.replicas: list[ReplicaLink] = []
        self.error: SlotlineError | None = None
        self._process, self._closed, self._ending = os.getpid(), False, threading.Lock()
        self.refused: deque[tuple[int, BaseException]] = deque()
        self._reports: deque[tuple[ReplicaLink, Report]] = deque()
        self._told = threading.Event()
        self._answers: dict[int, tuple[ReplicaLink, Future[Any]]] = {}
        self._number = 0
        self._shared = open_meeting_place(loaded) if replicas_share_experts(loaded) else None
        self._meetings = 0
        self._launched: dict[int, Launched] = {}
        self._leaving: list[threading.Thread] = []
        self._new: list[ReplicaLink] = []
        self.join(self.start(loaded, digest, range(self._parallel.data)))

    def start(self, loaded: LoadedConfig, digest: str, numbers: Sequence[int]) -> list[ReplicaLink]:
        """Start replicas, and return them once their engines are built. They get no requests until `join`.

        Args:
            loaded: their configuration.
            digest: of the plan that they must have.
            numbers: theirs, which no other replica has.

        Raises:
            ConfigError: if the configuration cannot be sent to another process.
            RankError: if one cannot be started, or has another plan.
            SlotlineError: what one raised while it built its engine. None of them is left then.
        """
        data = packed(loaded)
        for thread in self._leaving:
            thread.join()  # their devices are free then
        self._leaving.clear()
        self._new = new = list[ReplicaLink]()
        try:
            connected = connect_replicas(
                numbers, lambda number, address: self._launch(loaded, number, address), self._parallel.start_timeout
            )
            new += [ReplicaLink(number, connection) for number, connection in sorted(connected.items())]
            for one in new:
                one.connection.send_bytes(data)
                if self._shared is not None:
                    one.connection.send_bytes(pickle.dumps(None if self.replicas else self._shared.address))
                threading.Thread(target=self._receive, args=(one,), name="slotline-front", daemon=True).start()
            self._await_ready(new, digest)
        except BaseException:
            self.drop(new, numbers)
            raise
        return new

    def next_meeting(self) -> MeetingAddress:
        """Return where replicas that share experts meet in another number than before."""
        assert self._shared is not None
        self._meetings += 1
        return self._shared.address._replace(generation=self._meetings)

    def join(self, new: Sequence[ReplicaLink]) -> None:
        """Let replicas take requests.

        Raises:
            SlotlineError: what happened to one of them, or to all replicas. None of them is left then.
        """
        with self._ending:
            error = self.error or next((one.failure for one in new if one.failure is not None), None)
            if error is None and self._closed:
                error = _closed()
            if error is None:
                for one in new:
                    one.joined, one.last = True, time.monotonic()
                self.replicas, self._new = [*self.replicas, *new], []
        if error is not None:
            self.drop(new, [one.number for one in new])
            raise error

    def drop(self, new: Sequence[ReplicaLink], numbers: Sequence[int]) -> None:
        """End replicas that have not joined."""
        self._new = []
        for one in new:
            one.leaving = True
            _shut(one.connection)
        for number in numbers:
            with self._ending:
                launched = self._launched.pop(number, None)
            if launched is not None:
                launched.end()

    def part(self) -> None:
        """End the last replica, which has nothing to do. Others go on meanwhile."""
        with self._ending:
            if self._closed:
                return
            *left, last = self.replicas
            self.replicas, last.leaving = left, True
            thread = threading.Thread(target=self._part, args=(last,), name="slotline-leaving", daemon=True)
            self._leaving.append(thread)
        thread.start()

    def _part(self, replica: ReplicaLink) -> None:
        wait([future for one, future in tuple(self._answers.values()) if one is replica], _LEAVE)
        _shut(replica.connection)
        self._launched[replica.number].end(_LEAVE)
        with self._ending:
            self._launched.pop(replica.number, None)

    def close(self, patience: float = 0.0) -> None:
        """End all replicas, after this many seconds in which they may end by themselves."""
        with self._ending:
            if self._closed or os.getpid() != self._process:
                return
            self._closed = True
        for one in (*self.replicas, *self._new):
            _shut(one.connection)
        until = time.monotonic() + patience
        for launched in tuple(self._launched.values()):
            launched.end(max(0.0, until - time.monotonic()))

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
        self,
        function: Callable[..., Any],
        *given: Any,
        reads: bool = False,
        only: int | None = None,
        to: Sequence[ReplicaLink] | None = None,
    ) -> list[Future[Any]]:
        """Have all replicas, or some, call a function of a module with their engines. See `Call`.

        Args:
            only: a number whose replica alone is to call it. Numbers above the last replica's begin again at 0.
            to: the replicas that are to call it.
        """
        futures, asked = [], self.replicas if to is None else to
        for one in asked if only is None else [asked[only % len(asked)]]:
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
            elif one.failure is not None:
                self._fail_answers(one)
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
            elif _stopped(self.pid_of(one.number)):
                self.fail(one, "its process was stopped by a signal")
            elif works and time.monotonic() - one.last > self._parallel.timeout:
                self.fail(one, f"it gave no sign of life for {self._parallel.timeout:g} s")

    def fail(self, replica: ReplicaLink, what: str, cause: BaseException | None = None) -> None:
        """End all replicas for the failure of one that has joined."""
        fix = "all replicas have ended: mend what the error names, and build the engine again"
        if self.replicas and not replica.joined:
            fix = "the other replicas go on: mend what the error names, and scale again"
        error = RankError(f"replica {replica.number} failed: {what}", fix=fix)
        error.__cause__ = cause
        self._failed(replica, error)

    def _failed(self, replica: ReplicaLink, error: SlotlineError) -> None:
        """Take the end of a replica. It ends the others if it has joined."""
        with self._ending:
            alone = not replica.joined or replica.leaving
            if alone and replica.failure is None:
                replica.failure = error
        if not alone:
            self._end(error)
            return
        self._fail_answers(replica)
        if not replica.ready.done():
            replica.ready.set_exception(error)

    def _fail_answers(self, replica: ReplicaLink) -> None:
        """Answer what a replica was asked that has ended, while the others work."""
        with self._ending:
            numbers = [number for number, (one, _) in self._answers.items() if one is replica]
            futures = [self._answers.pop(number)[1] for number in numbers]
        for future in futures:
            future.set_exception(replica.failure)

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
            waiting += one.open.values()
            one.open.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def _launch(self, loaded: LoadedConfig, number: int, address: str) -> Launched:
        """Start a replica's process, unless all are ended."""
        launched = self._start(loaded, number, address)
        with self._ending:
            if not self._closed:
                self._launched[number] = launched
                return launched
        launched.end()
        raise self.error or _closed()

    def _await_ready(self, new: Sequence[ReplicaLink], digest: str) -> None:
        """Wait until the engines of replicas are built.

        Raises:
            SlotlineError: what a replica raised.
            RankError: if one ends, is late, or has another plan.
        """
        done, _ = wait([one.ready for one in new], self._parallel.start_timeout, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if missing := [one.number for one in new if not one.ready.done()]:
            raise late(missing, self._parallel.start_timeout)
        for one in new:
            ready = one.ready.result()
            if ready.digest != digest:
                raise RankError(
                    f"the plan of replica {one.number} is {ready.digest} and that of the front {digest}",
                    fix="give all replicas the same devices, files and packages",
                )
            one.load = ready.load

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
                    self._failed(replica, message.error)
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
        """Take the end of a replica's connection. It ends all replicas, unless this one leaves or has not joined."""
        if replica.leaving or self._closed:
            if replica.leaving or not replica.joined:
                self._failed(replica, self.error or RankError(f"replica {replica.number} was ended", fix="ask again"))
            return
        until, launched, text = time.monotonic() + _SETTLE, self._launched.get(replica.number), None
        while launched and (text := launched.exit_of(0)) is None and time.monotonic() < until:
            time.sleep(0.01)
        self.fail(replica, f"its process has ended{f': {text}' if text else ''}")

    def pid_of(self, number: int) -> int:
        """Return the id of a replica's process."""
        return self._launched[number].pid_of(0)


def _closed() -> RankError:
    return RankError("the engine was closed", fix="build it again")


def _shut(connection: Connection) -> None:
    """End a connection that another thread reads."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as opened:
        opened.shutdown(socket.SHUT_RDWR)


def _stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
