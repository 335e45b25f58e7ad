"""Compiled grammars: made in threads of their own, kept for later requests with the same constraint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from slotline.core.batch.request import Request
from slotline.plugins.structured_output.mask_cache import CachedGrammar, MaskCache
from slotline.registry.contracts import Constraint, GrammarState, StructuredOutput
from slotline.registry.own_process import OwnProcess

_LOOKS_UP = 0.02
"""Seconds after which an idle engine looks whether another thread wants to use it."""


class GrammarCompiler:
    """Compiles constraints while steps run. A request whose grammar is not compiled is not scheduled.

    The plugin is built for the first request that needs it, or by `build`: importing its package and reading the
    vocabulary takes a moment that most runs need not spend.

    Args:
        cache_of: returns where masks of the built plugin are kept. None keeps none.
    """

    def __init__(
        self,
        build: Callable[[], StructuredOutput],
        *,
        threads: int,
        capacity: int,
        cache_of: Callable[[StructuredOutput], MaskCache] | None = None,
    ) -> None:
        self._build = build
        self._cache_of = cache_of
        self._cache: MaskCache | None = None
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
            backend = self._build()
            self._cache = None if self._cache_of is None else self._cache_of(backend)
            self._backend = backend
        return self._backend

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not compiled yet."""
        return len(self._waiting)

    def knows(self, constraint: Constraint) -> bool:
        """Return whether a constraint is compiled or being compiled."""
        return constraint in self._compiled

    def submit(self, request: Request, constraint: Constraint) -> None:
        """Compile a request's constraint, unless that is done or under way.

        Raises:
            RequestError: in a forked child.
        """
        self._own_process.refuse_others()
        future = self._compiled.pop(constraint, None)
        if future is None:
            future = self._pool.submit(self._compile, self.backend, constraint)
        self._compiled[constraint] = future  # the latest last
        while len(self._compiled) > self._capacity:
            self._compiled.popitem(last=False)
        self._waiting[request.request_id] = (request, future)

    def collect(
        self, *, idle: bool, gives_way: Callable[[], bool] = lambda: False
    ) -> tuple[list[Request], list[tuple[Request, BaseException]]]:
        """Return the requests whose grammar was compiled since the last call, and those whose grammar cannot be.

        Args:
            idle: there is nothing else to do, so wait for the first grammar.
            gives_way: called now and then while waiting. True ends the wait, since there is other work.
        """
        self._own_process.refuse_others()
        futures = [future for _, future in self._waiting.values()]
        while idle and futures and not wait(futures, _LOOKS_UP, FIRST_COMPLETED).done:
            idle = not gives_way()
        done = [(request, future) for request, future in self._waiting.values() if future.done()]
        ready, failed = [], []
        for request, future in done:
            error = future.exception()
            if error is None:
                self._ready[request.request_id] = future.result()
                del self._waiting[request.request_id]
                ready.append(request)
            else:  # it waits until it has ended, so that it is not lost on the way
                failed.append((request, error))
                self._compiled = OrderedDict((c, f) for c, f in self._compiled.items() if f is not future)
        return ready, failed

    def has(self, request: Request) -> bool:
        """Return True for a request that was submitted and is not forgotten."""
        return request.request_id in self._ready or self.is_waiting(request)

    def is_waiting(self, request: Request) -> bool:
        """Return True if a request's grammar is not compiled yet, or cannot be compiled."""
        waiting = self._waiting.get(request.request_id)
        return waiting is not None and waiting[0] is request

    def start(self, request: Request) -> GrammarState:
        """Return the state without output of a request that `collect` returned and that has not ended."""
        grammar = self._ready[request.request_id]
        return grammar.start(self.backend) if isinstance(grammar, CachedGrammar) else self.backend.start(grammar)

    def retain(self, unfinished: Mapping[str, Request]) -> None:
        """Forget all but the unfinished requests, by id."""
        for request_id, (request, _) in list(self._waiting.items()):
            if unfinished.get(request_id) is not request:
                del self._waiting[request_id]
        self._ready = {request_id: grammar for request_id, grammar in self._ready.items() if request_id in unfinished}

    def forget(self, request: Request) -> None:
        """Forget a request that ends. A grammar that is being compiled is kept for others."""
        self._waiting.pop(request.request_id, None)
        self._ready.pop(request.request_id, None)

    def _compile(self, backend: StructuredOutput, constraint: Constraint) -> Any:
        compiled = backend.compile(constraint)
        return compiled if self._cache is None else CachedGrammar(compiled, constraint, self._cache)
