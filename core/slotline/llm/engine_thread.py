"""A thread of its own for an engine: it steps while requests are unfinished, and makes calls in between."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar

from slotline.core.engine.output_processor import StepResult
from slotline.ranks.replicas.front import Front, end_front
from slotline.ranks.replicas.replica_front import ReplicaFront
from slotline.registry.errors import RequestError
from slotline.registry.own_process import OwnProcess

R = TypeVar("R")
Call = tuple[Callable[[], Any], "Future[Any]"]


class Receiver(Protocol):
    """Receiver of what the thread's steps give. Its methods run on the engine's thread."""

    def hand_out(self, engine: Front, result: StepResult) -> None:
        """Take the results of a step."""
        ...

    def fail(self, engine: Front, error: BaseException) -> None:
        """Take the exception that escaped from a step. All unfinished requests are restored."""
        ...

    def close(self, error: BaseException) -> None:
        """Take the end of the thread."""
        ...


class EngineThread:
    """A thread that builds an engine, steps it, and makes calls between two steps.

    The engine is built on the thread as well, since pools of threads for computing belong to the thread that began
    them.

    Attributes:
        front: the engine, or the front of its replicas.

    Raises:
        SlotlineError: if the engine cannot be built.
    """

    def __init__(self, build: Callable[[], Front], receiver: Receiver) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._own_process = OwnProcess("the engine's thread")
        self._closed = False
        built: Future[Front] = Future()
        self._thread = Thread(target=self._run, args=(build, receiver, built), name="slotline-engine", daemon=True)
        self._thread.start()
        self.front = built.result()

    def call(self, function: Callable[[], R]) -> Future[R]:
        """Have the thread call a function between two steps. Return the future of its result.

        Raises:
            RequestError: if the thread is closed, or in a forked child, where it does not run.
        """
        self._own_process.refuse_others()
        if self._closed:
            raise _closed()
        future: Future[R] = Future()
        self._calls.put((function, future))
        self._wake()
        return future

    def close(self) -> None:
        """End the thread after the step that runs, and wait for its end. Requests that are unfinished are aborted."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
            self._wake()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive() and not self._closed

    def _wake(self) -> None:
        """Have the thread look at its calls, if it waits for replicas."""
        if isinstance(self.front, ReplicaFront):
            self.front.wake()

    def _run(self, build: Callable[[], Front], receiver: Receiver, built: Future[Front]) -> None:
        try:
            engine = build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(engine)
        try:
            while self._make_calls(engine):
                if engine.requests:
                    self._step(engine, receiver)
        finally:
            self._end(engine, receiver)

    def _make_calls(self, engine: Front) -> bool:
        """Make the calls that wait. Without requests wait for the first. Return False when the thread is to end."""
        while True:
            try:
                call = self._calls.get(block=not engine.requests)
            except Empty:
                return True
            if call is None:
                return False
            function, future = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

    @staticmethod
    def _step(engine: Front, receiver: Receiver) -> None:
        try:
            receiver.hand_out(engine, engine.step())
        except BaseException as error:
            receiver.fail(engine, error)

    def _end(self, engine: Front, receiver: Receiver) -> None:
        """Abort the requests that are unfinished, and refuse the calls that still wait."""
        self._closed = True
        receiver.close(_closed())
        for request_id in tuple(engine.requests):
            engine.abort(request_id)
        end_front(engine)
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None and call[1].set_running_or_notify_cancel():
                call[1].set_exception(_closed())


def _closed() -> RequestError:
    return RequestError("the engine was closed", fix="make a new AsyncLLM")
