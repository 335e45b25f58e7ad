"""One thread at a time in an engine: the others wait for their turn, in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from threading import Event, Lock, get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class EngineLock:
    """A lock that its owner may take again, and that is handed on in the order of arrival.

    A plain lock is not fair. A thread that runs one step after the other would take it again before a waiting thread
    wakes up.

    Attributes:
        lock: held by the thread that is in the engine.
        owner: that thread. A thread that reads its own number here holds the lock.
        line: an event for each waiting thread, which is set when the thread is in, or has given up.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.owner: int | None = None
        self.line: deque[Event] = deque()

    @property
    def is_mine(self) -> bool:
        """Whether this thread is in the engine already, as in a callback of a step."""
        return self.owner == get_ident()


class HasLock(Protocol):
    """An object that one thread at a time may use."""

    lock: EngineLock

    def settle(self) -> None:
        """Repair what an interrupted call left, before the next call."""
        ...


S = TypeVar("S", bound=HasLock)


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a method run while no other thread is in the engine; its callbacks may enter again."""

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        lock, me, waiting = self.lock, get_ident(), None
        if lock.owner == me:
            return method(self, *args, **options)
        try:
            if lock.owner is not None or lock.line:
                before, waiting = tuple(lock.line), Event()
                lock.line.append(waiting)
                for earlier in before:
                    earlier.wait()
            with lock.lock:
                lock.owner = me
                if waiting is not None:
                    waiting.set()
                try:
                    self.settle()
                    return method(self, *args, **options)
                finally:
                    lock.owner = None
        finally:
            if waiting is not None:
                waiting.set()
                if waiting in lock.line:
                    lock.line.remove(waiting)

    return guarded
