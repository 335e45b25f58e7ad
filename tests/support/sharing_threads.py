"""Replicas that share experts, as threads of the test's process. They build in turn, and step freely."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import replica_threads
import thread_ranks
from attrs import define, field
from thread_ranks import Meetings, ThreadGroup

from slotline.planner.plan import make_plan
from slotline.plugins.model_families.tensor_parallel.threads import Meeting
from slotline.ranks.replicas import front, regroup, replica, replica_front
from slotline.ranks.replicas.meetings import join_meetings
from slotline.ranks.replicas.replica_links import ReplicaLinks
from slotline.ranks.replicas.sharing import MeetingAddress, build_sharing, place_of
from slotline.ranks.replicas.sharing_engine import SharingEngine
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import CommunicatorContext
from slotline.registry.ranks import Place


@define(eq=False)
class FreeMeeting(Meeting):
    """Meeting of threads that step freely. One that builds has the turn all the time."""

    def gather(self, rank: int, value: Any) -> list[Any]:
        with self.turn:
            return super().gather(rank, value)


class FreeMeetings(Meetings):
    """Meetings of all groups of such threads."""

    def of(self, context: CommunicatorContext) -> Meeting:
        with self.everyone.turn:
            made = FreeMeeting(len(context.ranks), self.everyone.turn)
            return self.groups.setdefault((context.name, context.ranks), made)


@define(eq=False)
class Replicas:
    """Engines of replicas that run as threads.

    Attributes:
        engines: by their numbers, once they are built.
    """

    engines: dict[int, SharingEngine] = field(factory=dict)
    _meetings: dict[tuple[int, int], FreeMeetings] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)

    def start(self, loaded: LoadedConfig, number: int, address: MeetingAddress) -> SharingEngine:
        """Build an engine as `slotline.ranks.replicas.sharing.start_sharing` does."""
        place = place_of(loaded, number)
        group: Any = self.join(place, address, 60.0)
        with group.meeting.turn:
            engine = build_sharing(make_plan(loaded, place=place), group)
        engine.join_others(group, join_meetings(group, 60.0))
        self.engines[number] = engine
        return engine

    def start_alone(self, loaded: LoadedConfig, number: int) -> SharingEngine:
        """Build an engine as `slotline.ranks.replicas.regroup.start_alone` does."""
        with replica_threads.BUILDING:
            engine = self.engines[number] = regroup.start_alone(loaded, number)
        return engine

    def join(self, place: Place, address: MeetingAddress, _timeout: float) -> ThreadGroup:
        """Join the other threads of a generation, as `slotline.ranks.replicas.sharing.join_replicas` does."""
        key = address.port, address.generation
        with self._lock:
            meetings = self._meetings.setdefault(key, FreeMeetings(FreeMeeting(place.size)))
        thread_ranks._here.meetings = meetings
        return ThreadGroup(place, meetings.everyone)


def capture_in_turn(engine: SharingEngine, plain: Any = SharingEngine.capture_again) -> None:
    """Capture while no other thread does, except where this one waits for it."""
    group: Any = engine.group
    with group.meeting.turn:
        plain(engine)


@contextmanager
def sharing_replicas(module: Any = thread_ranks) -> Iterator[tuple[Replicas, dict[str, Any]]]:
    """Have replicas that are started meanwhile run as threads. Gives their engines, and the settings to build by.

    Args:
        module: has the descriptor of the communicator.
    """
    replicas, name = Replicas(), module.descriptor.name
    settings = {"plugins.inline": (f"{module.__file__}:descriptor",), "parallel.communicator": name}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "ReplicaLinks", partial(ReplicaLinks, start=replica_threads.start_thread))
        patch.setattr(replica, "start_sharing", replicas.start)
        patch.setattr(replica, "start_alone", replicas.start_alone)
        patch.setattr(replica_front, "_reload", replica_threads.reload_alone)
        patch.setattr(regroup, "join_replicas", replicas.join)
        patch.setattr(SharingEngine, "capture_again", capture_in_turn)
        yield replicas, settings
