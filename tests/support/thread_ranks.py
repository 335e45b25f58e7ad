"""Ranks of an engine as threads of one process, which run one at a time and take turns at collectives.

Each rank has a whole engine of its own, as under torchrun: every rank is asked for the same things.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import define, field

from slotline.builder.engine_builder import build_engine
from slotline.core import LLM
from slotline.llm.settings import load_settings
from slotline.llm.submitter import Submitter
from slotline.planner.plan import make_plan
from slotline.planner.ranks import layout_of
from slotline.plugins.model_families.tensor_parallel.threads import Meeting, ThreadCommunicator, is_effect
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
class Meetings:
    """Meetings of all groups of ranks, which have one turn.

    Attributes:
        everyone: of all ranks.
    """

    everyone: Meeting
    groups: dict[tuple[str, tuple[int, ...]], Meeting] = field(factory=dict, init=False)

    def of(self, context: CommunicatorContext) -> Meeting:
        """The meeting of a group."""
        made = Meeting(len(context.ranks), self.everyone.turn)
        return self.groups.setdefault((context.name, context.ranks), made)

    def each(self, call: Callable[[Meeting], None]) -> None:
        """Do the same with all of them."""
        for meeting in (self.everyone, *self.groups.values()):
            call(meeting)


def join(context: CommunicatorContext) -> ThreadCommunicator:
    """Join the ranks of this thread's engine."""
    return ThreadCommunicator(_here.meetings.of(context), context.rank, context.name)


@define(eq=False)
class ThreadGroup:
    """All ranks, as `slotline.ranks.group.RankGroup` has them."""

    place: Place
    meeting: Meeting
    communicators: list[Communicator] = field(factory=list, init=False)
    replica: None = None

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.gather(self.place.rank, value)

    def gather_bytes(self, value: bytes) -> list[bytes]:
        return self.gather(value)

    def close(self) -> None:
        """Do nothing."""


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
        tensor, pipeline: number of ranks.
        communicator: module that has the descriptor of the communicator.
        settings: as of `LLM`.

    Attributes:
        llms: one for each rank.
    """

    def __init__(
        self,
        model: Path | None = None,
        *,
        tensor: int = 2,
        pipeline: int = 1,
        communicator: Any = sys.modules[__name__],
        **settings: Any,
    ) -> None:
        inline = (*settings.pop("plugins.inline", ()), f"{communicator.__file__}:descriptor")
        settings |= {"plugins.inline": inline, "parallel.communicator": communicator.descriptor.name}
        settings |= {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
        settings.setdefault("observability.check_integrity", True)
        if model is not None:
            settings["model"] = model
        self._meetings = Meetings(Meeting(tensor * pipeline))
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
        group = ThreadGroup(place, self._meetings.everyone)
        engine = build_engine(loaded, group, RankedEngine, make_plan(loaded, place=place))
        assert isinstance(engine, RankedEngine)
        told: Any = Told(group)
        engine.connect(group, None if rank else told, told if rank else None, logged=False)
        llm = object.__new__(LLM)
        llm.loaded, llm.front, llm.submitter, llm._weights = loaded, engine, Submitter(engine), None
        return llm

    def _all(self, call: Callable[[int], R]) -> list[R]:
        def turn(rank: int) -> R:
            _here.meetings = self._meetings
            torch.set_num_threads(1)
            with self._meetings.everyone.turn:
                try:
                    return call(rank)
                except BaseException:
                    self._meetings.each(Meeting.give_up)
                    raise

        self._meetings.each(Meeting.begin)
        running = [pool.submit(turn, rank) for rank, pool in enumerate(self._pools)]
        errors = [error for one in running if (error := one.exception()) is not None]
        if errors:
            raise min(errors, key=is_effect)
        return [one.result() for one in running]
