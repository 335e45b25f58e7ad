"""One thread at a time in an engine: the others wait for their turn, in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from threading import Event, get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from slotline.registry.own_process import OwnProcess

P = ParamSpec("P")
R = TypeVar("R")
HOLDER = 0
"""Key of the thread that is in the engine."""


class EngineLock:
    """Lock that its holder may take again, and that is handed on in the order of arrival.

    A lock of Python's is not fair: a thread that runs one step after the other would take it again before a waiting
    thread wakes up. And an exception of a signal's handler may come between taking it and noting that it is taken. Here
    one operation on a dictionary does both.

    Attributes:
        holder: `HOLDER` and the number of the thread that is in the engine, empty if there is none.
        line: an event for each waiting thread, which is set when it may be that thread's turn.
    """

    def __init__(self) -> None:
        self.holder: dict[int, int] = {}
        self.line: deque[Event] = deque()
        self._own_process = OwnProcess("the engine")

    def wait(self, me: int) -> None:
        """Wait until this thread holds the lock.

        Raises:
            RequestError: in a forked child, since the thread that holds it does not run there.
        """
        self._own_process.refuse_others()
        turn = Event()
        try:
            self.line.append(turn)
            while self.line[0] is not turn or self.holder.setdefault(HOLDER, me) != me:
                turn.wait()
                turn.clear()
        finally:
            if turn in self.line:
                self.line.remove(turn)
            self.wake_next()

    def wake_next(self) -> None:
        """Have the first waiting thread check whether it is its turn."""
        for turn in tuple(self.line)[:1]:  # a copy: other threads come and go meanwhile
            turn.set()


class HasLock(Protocol):
    """An object that one thread at a time may use.

    Attributes:
        unsettled: whether a call is under way, or was interrupted.
    """

    lock: EngineLock
    unsettled: bool

    def settle(self) -> None:
        """Repair the state that an interrupted call left, before the next call."""
        ...


S = TypeVar("S", bound=HasLock)


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a method run while no other thread is in the engine. Its callbacks may enter again."""

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        lock, me = self.lock, get_ident()
        if lock.holder.get(HOLDER) == me:
            return method(self, *args, **options)
        try:
            if lock.line or lock.holder.setdefault(HOLDER, me) != me:
                lock.wait(me)
            if self.unsettled:
                self.settle()
            return method(self, *args, **options)
        finally:  # no call before the lock is given back, since signals are handled after calls
            if HOLDER in lock.holder and lock.holder[HOLDER] == me:
                del lock.holder[HOLDER]
            if lock.line:
                lock.wake_next()

    return guarded
