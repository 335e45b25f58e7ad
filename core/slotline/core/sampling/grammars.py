"""Compiled grammars: made in threads of their own, kept for later requests with the same constraint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from slotline.core.process import OwnProcess
from slotline.core.scheduling.request import Request
from slotline.registry.contracts import Constraint, StructuredOutput


class GrammarCompiler:
    """Compiles constraints beside the steps. A request whose grammar is not compiled is not scheduled.

    The plugin is built for the first request that needs it, or by `build`: importing its package and reading the
    vocabulary takes a moment that most runs need not spend.
    """

    def __init__(self, build: Callable[[], StructuredOutput], *, threads: int, capacity: int) -> None:
        self._build = build
        self._backend: StructuredOutput | None = None
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="slotline-grammar")
        self._capacity = capacity
        self._compiled: OrderedDict[Constraint, Future[Any]] = OrderedDict()
        self._waiting: dict[str, tuple[Request, Future[Any]]] = {}
        self._ready: dict[str, Any] = {}
        self._own_process = OwnProcess("the grammar compiler")

    @property
    def backend(self) -> StructuredOutput:
        """The built plugin."""
        return self.build()

    def build(self) -> StructuredOutput:
        """Build the plugin, unless that is done."""
        if self._backend is None:
            self._backend = self._build()
        return self._backend

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not compiled yet."""
        return len(self._waiting)

    def knows(self, constraint: Constraint) -> bool:
        """Whether a constraint is compiled, or is being compiled."""
        return constraint in self._compiled

    def submit(self, request: Request, constraint: Constraint) -> None:
        """Compile a request's constraint, unless that is done or under way.

        Raises:
            RequestError: in a forked child.
        """
        self._own_process.refuse_others()
        future = self._compiled.pop(constraint, None)
        if future is None:
            future = self._pool.submit(self.backend.compile, constraint)
        self._compiled[constraint] = future  # the latest last
        while len(self._compiled) > self._capacity:
            self._compiled.popitem(last=False)
        self._waiting[request.request_id] = (request, future)

    def collect(self, *, idle: bool) -> tuple[list[Request], list[tuple[Request, BaseException]]]:
        """The requests whose grammar has been compiled since the last call, and those whose cannot be.

        Args:
            idle: whether there is nothing else to do, so that waiting for the first one is right.
        """
        self._own_process.refuse_others()
        if idle and self._waiting:
            wait([future for _, future in self._waiting.values()], return_when=FIRST_COMPLETED)
        done = [(request, future) for request, future in self._waiting.values() if future.done()]
        ready, failed = [], []
        for request, future in done:
            del self._waiting[request.request_id]
            error = future.exception()
            if error is None:
                self._ready[request.request_id] = future.result()
                ready.append(request)
            else:
                failed.append((request, error))
                self._compiled = OrderedDict((c, f) for c, f in self._compiled.items() if f is not future)
        return ready, failed

    def take(self, request: Request) -> Any:
        """The compiled grammar of a request that `collect` gave; once."""
        return self._ready.pop(request.request_id)

    def forget(self, request: Request) -> None:
        """The request ends before it took its grammar; what is being compiled is kept for others."""
        self._waiting.pop(request.request_id, None)
        self._ready.pop(request.request_id, None)
