"""Ranks of an engine as threads of one process, which run one at a time and take turns at collectives.

Each rank has a whole engine of its own, as under torchrun: every rank is asked for the same things.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import define, field, frozen

from slotline.builder.engine_builder import build_engine
from slotline.core import LLM
from slotline.llm.settings import load_settings
from slotline.llm.submitter import Submitter
from slotline.planner.plan import make_plan
from slotline.planner.ranks import layout_of
from slotline.ranks.ranked_engine import RankedEngine
from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import Communicator, CommunicatorCapabilities, CommunicatorContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import RankError, SlotlineError
from slotline.registry.ranks import Place

R = TypeVar("R")
_here = threading.local()

descriptor = Descriptor(
    kind=Kind.COMMUNICATOR,
    name="threads",
    summary="ranks that are threads of one process",
    capabilities=CommunicatorCapabilities(
        devices=Set(("cpu",)), dtypes=Set(None), batch_invariant=Flag(True), priority=100
    ),
    factory="thread_ranks:join",
)


@define(eq=False)
class Exchange:
    """What ranks give each other. One rank runs at a time, the others wait here."""

    size: int
    turn: threading.Lock = field(factory=threading.Lock)
    given: list[Any] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    mail: dict[tuple[str, int, int], deque[Any]] = field(factory=lambda: defaultdict(deque), init=False)
    arrived: threading.Condition = field(factory=threading.Condition, init=False)

    def __attrs_post_init__(self) -> None:
        self.given, self.barrier = [None] * self.size, threading.Barrier(self.size, timeout=60.0)

    def send(self, what: str, rank: int, to: int, value: Any) -> None:
        """Leave a value for another rank."""
        with self.arrived:
            self.mail[what, rank, to].append(value)
            self.arrived.notify_all()

    def receive(self, what: str, rank: int, source: int) -> Any:
        """Return the next value that another rank has left."""
        self.turn.release()
        try:
            with self.arrived:
                there = self.mail[what, source, rank]
                if not self.arrived.wait_for(lambda: there or self.barrier.broken, timeout=60.0) or not there:
                    raise threading.BrokenBarrierError
                return there.popleft()
        finally:
            self.turn.acquire()

    def give_up(self) -> None:
        """End the others' waiting."""
        self.barrier.abort()
        with self.arrived:
            self.arrived.notify_all()

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        self.given[rank] = value
        self.turn.release()
        try:
            self.barrier.wait()
            found = list(self.given)
            self.barrier.wait()
        finally:
            self.turn.acquire()
        return found


@frozen
class Finished:
    """Implements `Exchange` of the contract."""

    out: torch.Tensor

    def finish(self) -> torch.Tensor:
        return self.out


class ThreadCommunicator:
    """Implements `Communicator` for tensors of one process."""

    def __init__(self, exchange: Exchange, rank: int, name: str) -> None:
        self._exchange, self.rank, self.size, self._name = exchange, rank, exchange.size, name

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return copies of all ranks' tensors."""
        return self._exchange.gather(self.rank, x.clone())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(x)).float().sum(0).to(x.dtype)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(self.gather(x), dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Finished:
        parts = self._exchange.gather(self.rank, x.clone().split(list(sent)))
        return Finished(torch.cat([part[self.rank] for part in parts]))

    def send(self, x: torch.Tensor, to: int) -> None:
        self._exchange.send(self._name, self.rank, to, x.clone())

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        found: torch.Tensor = self._exchange.receive(self._name, self.rank, source)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        return found

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self.gather(x)[source].clone()

    def abort(self) -> None:
        self._exchange.barrier.abort()

    def close(self) -> None:
        """Do nothing."""


def join(context: CommunicatorContext) -> ThreadCommunicator:
    """Join the ranks of this thread's engine."""
    return ThreadCommunicator(_here.exchange, context.rank, context.name)


@define(eq=False)
class ThreadGroup:
    """All ranks, as `slotline.ranks.group.RankGroup` has them."""

    place: Place
    exchange: Exchange
    communicators: list[Communicator] = field(factory=list, init=False)

    def gather(self, value: Any) -> list[Any]:
        return self.exchange.gather(self.place.rank, value)

    def gather_bytes(self, value: bytes) -> list[bytes]:
        return self.gather(value)


class Told:
    """Rank 0's connections and its watch, or another rank's connection. All ranks raise the same errors."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group, self.building, self.within = group, False, False
        self.failure, self.failed, self.watch = "", threading.Event(), self
        self._error: SlotlineError | None = None

    def begin_step(self) -> None:
        self.within = True

    def end_step(self) -> None:
        self.within = False

    def all_raised(self) -> bool:
        return True

    def raised(self, error: BaseException) -> None:
        """Do nothing."""

    def fail(self, error: BaseException) -> None:
        self._error = RankError(str(error))
        self.failed.set()

    def disagrees(self, rank: int, where: str) -> None:
        self.fail(RankError(f"rank {rank} disagrees with rank 0: {where}"))

    def failure_within(self, _seconds: float) -> str:
        return self.failure

    def error(self) -> SlotlineError:
        return self._error or RankError("the ranks have lost each other")


class ThreadRanks:
    """LLMs of all ranks of one engine.

    Args:
        tensor, pipeline: number of ranks. One of them is 1.
        settings: as of `LLM`.

    Attributes:
        llms: one for each rank.
    """

    def __init__(self, model: Path | None = None, *, tensor: int = 2, pipeline: int = 1, **settings: Any) -> None:
        inline = (*settings.pop("plugins.inline", ()), f"{__file__}:descriptor")
        settings |= {"plugins.inline": inline, "parallel.communicator": "threads"}
        settings |= {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
        settings.setdefault("observability.check_integrity", True)
        if model is not None:
            settings["model"] = model
        self._exchange = Exchange(tensor * pipeline)
        self._pools = [ThreadPoolExecutor(1) for _ in range(tensor * pipeline)]
        self.llms: list[LLM] = []
        self.llms = self._all(lambda rank: self._built(rank, settings))

    def each(self, call: Callable[[LLM], R]) -> list[R]:
        """Return what a function gives for every rank's `LLM`, called on the ranks' threads."""
        return self._all(lambda rank: call(self.llms[rank]))

    def same(self, call: Callable[[LLM], R]) -> R:
        """Return what a function gives for every rank's `LLM`, which must be the same."""
        first, *others = self.each(call)
        assert all(other == first for other in others)
        return first

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools:
            pool.shutdown()

    def _built(self, rank: int, settings: dict[str, Any]) -> LLM:
        loaded = load_settings(None, (), settings)
        place = Place(rank=rank, local_rank=rank, layout=layout_of(loaded))
        group = ThreadGroup(place, self._exchange)
        engine = build_engine(loaded, group, RankedEngine, make_plan(loaded, place=place))
        assert isinstance(engine, RankedEngine)
        told: Any = Told(group)
        engine.connect(group, None if rank else told, told if rank else None, logged=False)
        llm = object.__new__(LLM)
        llm.loaded, llm.front, llm.submitter, llm._weights = loaded, engine, Submitter(engine), None
        return llm

    def _all(self, call: Callable[[int], R]) -> list[R]:
        def turn(rank: int) -> R:
            _here.exchange = self._exchange
            torch.set_num_threads(1)
            with self._exchange.turn:
                try:
                    return call(rank)
                except BaseException:
                    self._exchange.give_up()
                    raise

        self._exchange.barrier.reset()
        running = [pool.submit(turn, rank) for rank, pool in enumerate(self._pools)]
        errors = [error for one in running if (error := one.exception()) is not None]
        if errors:
            raise min(errors, key=_is_effect)
        return [one.result() for one in running]


def _is_effect(error: BaseException) -> bool:
    """Return True for an error that another rank's error has made."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, threading.BrokenBarrierError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None
