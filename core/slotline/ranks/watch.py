"""Watch over the other ranks: which of them died, hangs, or raised an error that rank 0 did not."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
from attrs import define, field, frozen

from slotline.ranks.group import RankGroup, waits_in
from slotline.ranks.stacks import lost_others, raised_text, stack_of, traceback_text
from slotline.registry.errors import RankError

BEAT = 0.5
"""Seconds between two signs of life."""
GRACE = 2.0
"""Seconds that rank 0 has to raise the error that another rank raised in the same step."""
_SETTLE = 0.3
"""Seconds after a first failure in which others are collected, so that the cause is named and not what it caused."""
_CAUSE, _OWN_ERROR, _EFFECT = range(3)
"""Order of failures: the first may cause the others."""
_ENDED = "its process has ended"
_MEND = "all ranks have ended: mend what the error names, and build the engine again"
_SLOW_START = "raise parallel.start_timeout if building may take that long, else mend what the stack shows"
_SLOW = "raise parallel.timeout if steps may take that long, else mend what the stack shows, and build the engine again"


@define(eq=False)
class Follower:
    """Another rank, as rank 0 knows it.

    Attributes:
        step: number of the last step that it is known to have begun.
        last: time of its last sign.
        raised: numbers of steps with the errors that it raised in them: line, traceback, whether it lost others.
        stack: its stack, whether it waits for others, and whether it is in a step, once it was asked for.
        planned: whether it is about to join rank 0.
        gone: whether its connection is closed.
        told: whether it said why it ends.
    """

    rank: int
    pid: int
    host: str
    log: Connection
    signs: Connection
    step: int = 0
    last: float = field(factory=time.monotonic)
    raised: dict[int, tuple[str, str, bool]] = field(factory=dict)
    stack: tuple[str, bool, bool] | None = None
    planned: bool = False
    gone: bool = False
    told: bool = False


@frozen
class _Failure:
    """A failure: its order among those of one moment, the rank, and the text of the error."""

    order: int
    rank: int
    step: int
    what: str
    details: str = ""
    fix: str = _MEND


class Watch:
    """A thread of rank 0 that reads the signs of the other ranks, and finds the first failure.

    Attributes:
        failed: set once a rank has failed.
        building: whether the engine is being built. Ranks take different times for that.
        step: number of the step that rank 0 is in, or has ended.
        within: whether rank 0 is in a step.
        on_failure: calls that are made when a rank has failed.
        group: all ranks, once this process has joined them.
        alive: returns what happened if a rank has ended.
        closed: ends the watch.
    """

    def __init__(self, timeout: float, start_timeout: float) -> None:
        self._timeout, self._start_timeout = timeout, start_timeout
        self.failed = threading.Event()
        self.building, self.step, self.within, self.closed = True, 0, False, False
        self.on_failure: list[Callable[[], Any]] = []
        self.group: RankGroup | None = None
        self.alive: Callable[[], str | None] = lambda: None
        self._followers: list[Follower] = []
        self._failures: list[_Failure] = []
        self._since = time.monotonic()
        self._thread = threading.get_ident()
        self._error: RankError | None = None

    def begin(self, followers: list[Follower]) -> None:
        """Watch these ranks from now on."""
        self._followers, self._since = followers, time.monotonic()
        threading.Thread(target=self._run, name="slotline-ranks", daemon=True).start()

    def begin_step(self) -> None:
        """Note that rank 0 begins a step, in this thread."""
        self.step += 1
        self._thread, self._since, self.within = threading.get_ident(), time.monotonic(), True

    def end_step(self) -> None:
        """Note that rank 0 has ended a step."""
        self.within = False

    def all_raised(self) -> bool:
        """Wait a while, and return whether every rank raised an error in the step in which rank 0 raised one."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until and not self.failed.is_set():
            if all(self.step in follower.raised for follower in self._followers):
                for follower in self._followers:
                    follower.raised.clear()
                return True
            time.sleep(0.002)
        return False

    def fail(self, error: BaseException) -> None:
        """Note an error that rank 0 raised, and the others did not."""
        order = _EFFECT if lost_others(error, waits_in(self.group)) else _OWN_ERROR
        what = f"it raised an error that the others did not: {raised_text(error)}"
        self._failures.append(_Failure(order, 0, self.step, what, traceback_text(error)))

    def disagrees(self, rank: int, what: str) -> None:
        """Note that the state of a rank is another than that of rank 0."""
        self._failures.append(_Failure(_CAUSE, rank, self.step, f"it disagrees with rank 0: {what}"))

    def error(self, patience: float) -> RankError:
        """Return the error that ended the engine, once it is known."""
        self.failed.wait(patience)
        return self._error or RankError("the ranks have lost each other", fix="build the engine again")

    def kill_stopped(self) -> None:
        """Kill the ranks of this machine that a signal stopped, since they hear nothing."""
        for one in self._followers:
            if one.host == socket.gethostname() and _stopped(one.pid):
                os.kill(one.pid, signal.SIGKILL)

    def _run(self) -> None:
        first = 0.0
        while not self.closed:
            self._read(BEAT / 5)
            if not self.closed and not self._failures:
                self._look()
            if self._failures and not first:
                first = time.monotonic()
            if self._failures and time.monotonic() - first > _SETTLE:
                self._end(min(self._failures, key=lambda one: one.order))
                return

    def _read(self, seconds: float) -> None:
        """Read the signs of these seconds."""
        by: dict[Any, Follower] = {one.signs: one for one in self._followers if not one.gone}
        if not by:
            time.sleep(seconds)
            return
        try:
            ready: list[Any] = list(wait(list(by), seconds))
        except (OSError, ValueError):  # closed by another thread
            return
        for connection in ready:
            follower = by[connection]
            try:
                kind, step, said = connection.recv()
            except (EOFError, OSError):
                follower.gone = True
                if not self.closed and not follower.told:
                    self._failures.append(_Failure(_CAUSE, follower.rank, self.step, _ENDED))
                continue
            follower.step, follower.last = step, time.monotonic()
            self._hear(follower, kind, step, said)

    def _hear(self, follower: Follower, kind: str, step: int, said: Any) -> None:
        if kind == "raised":
            follower.raised[step] = said
        elif kind == "stack":
            follower.stack = said
        elif kind == "planned":
            follower.planned = True
        elif kind == "failed":
            follower.told = True
            line, text, lost = said
            order = _EFFECT if lost else _OWN_ERROR
            self._failures.append(_Failure(order, follower.rank, step, f"it raised {line}", text))
        elif kind == "closed":
            follower.told = follower.gone = True
            if self.within:
                self._failures.append(_Failure(_CAUSE, follower.rank, step, "it has closed the engine"))

    def _look(self) -> None:
        """Look for ranks that are stopped, silent, or raised an error that rank 0 did not."""
        now = time.monotonic()
        for one in self._followers:
            if one.gone:
                continue
            if one.host == socket.gethostname() and _stopped(one.pid):
                self._failures.append(_Failure(_CAUSE, one.rank, self.step, "its process was stopped by a signal"))
            elif now - one.last > self._timeout and not self.building:
                text = f"it gave no sign of life for {self._timeout:g} s"
                self._failures.append(_Failure(_CAUSE, one.rank, self.step, text))
            for step, (line, text, lost) in list(one.raised.items()):
                passed = step < self.step or not self.within  # rank 0 is past the step, without an error
                if passed or now - self._since > GRACE:
                    what = f"it raised an error that rank 0 did not: {line}"
                    order = _EFFECT if lost else _OWN_ERROR
                    self._failures.append(_Failure(order, one.rank, step, what, text))
        most = self._start_timeout if self.building else self._timeout
        if (self.within or self.building) and now - self._since > most and not self._failures:
            self._failures.append(self._hanging(most))

    def _hanging(self, seconds: float) -> _Failure:
        """Return which rank the others wait for. The one that does not wait itself is the cause."""
        there = [one for one in self._followers if not one.gone]
        for one in there:
            one.stack = None
            with suppress(OSError):
                one.signs.send("stack")
        until = time.monotonic() + 1.0
        while any(one.stack is None for one in there) and time.monotonic() < until:
            self._read(0.02)
        text, waits = stack_of(self._thread, waits_in(self.group))
        found = [(_Failure(_CAUSE, 0, self.step, "", text), waits)]
        for one in there:
            text, waits, within = one.stack or ("", False, True)
            done = not within and one.step >= self.step
            found.append((_Failure(_CAUSE, one.rank, one.step, "", text), waits or done))
        cause = min(found, key=lambda pair: (pair[1], pair[0].step, -pair[0].rank))[0]
        if self.building:
            what, fix = f"it is not ready after {seconds:g} s", _SLOW_START
        else:
            what, fix = f"it hangs, and the others have waited for {seconds:g} s", _SLOW
        return _Failure(_CAUSE, cause.rank, cause.step, what, cause.details, fix)

    def _end(self, failure: _Failure) -> None:
        if self.closed or self.failed.is_set():
            return
        self._error = RankError(
            f"rank {failure.rank} failed {self._when(failure.step)}: {self._what(failure)}",
            fix=failure.fix,
            rank=failure.rank,
            step=failure.step,
            details=failure.details,
        )
        for follower in self._followers:
            with suppress(OSError):
                follower.signs.send(f"failed:{self._error.message}")
        self.failed.set()
        for call in self.on_failure:
            with suppress(Exception):
                call()

    def _what(self, failure: _Failure) -> str:
        """Return what happened to a rank. Its exit code tells more than its closed connection."""
        ended = self.alive() if failure.what == _ENDED else None
        own = f"rank {failure.rank} has ended: "
        return f"{_ENDED}: {ended.removeprefix(own)}" if ended is not None and ended.startswith(own) else failure.what

    def _when(self, step: int) -> str:
        if self.building:
            return "while the engine was built"
        return f"in step {step}" if self.within or step < self.step else f"after step {step}"


def _stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
