"""Start of replicas that share the experts of their mixtures, and the place where they meet.

The front opens a store. Each replica joins the group of a generation there, builds its engine in step with the others,
and connects with them. A group can be left for that of a later generation, of another size.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from attrs import frozen
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from slotline.builder.communicators import Ranks
from slotline.builder.engine_builder import build_engine
from slotline.planner.plan import Planned, make_plan
from slotline.planner.ranks import layout_of
from slotline.ranks.expert_balance import build_expert_balance
from slotline.ranks.group import RankGroup, join_store, refuse_without_gloo
from slotline.ranks.replicas.meetings import join_meetings
from slotline.ranks.replicas.sharing_engine import SharingEngine
from slotline.registry.config import LoadedConfig
from slotline.registry.ranks import Place

_HERE = "127.0.0.1"
PATIENCE = 0.8
"""Part of `parallel.timeout` that a replica waits for another, so that it names that one before the front names it."""


class MeetingAddress(NamedTuple):
    """Where replicas join a group.

    Attributes:
        host, port: of the store.
        generation: of the group, from 0.
    """

    host: str
    port: int
    generation: int = 0


@frozen(eq=False)
class MeetingPlace:
    """The store of the front that replicas join groups by.

    Attributes:
        store: serves the replicas as long as it is held.
        address: of the first group.
    """

    store: TCPStore
    address: MeetingAddress


def open_meeting_place(loaded: LoadedConfig) -> MeetingPlace:
    """Open a store for replicas of this machine.

    Raises:
        ConfigError: if torch has no gloo.
    """
    refuse_without_gloo()
    wait = timedelta(seconds=loaded.config.parallel.start_timeout)
    store = TCPStore(_HERE, 0, is_master=True, wait_for_workers=False, timeout=wait)
    return MeetingPlace(store, MeetingAddress(_HERE, store.port))


def place_of(loaded: LoadedConfig, number: int) -> Place:
    """Return the place of a replica among those that share experts."""
    return Place(rank=number, local_rank=number, layout=layout_of(loaded))


def join_replicas(place: Place, address: MeetingAddress, timeout: float) -> RankGroup:
    """Join the other replicas of a generation.

    Args:
        timeout: seconds to wait for them.

    Raises:
        ConfigError: if this process already belongs to other ranks.
        RankError: if the others cannot be reached in time.
    """
    store = TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout))
    return join_store(place, PrefixStore(f"slotline/replicas/{address.generation}", store), timeout)


def start_sharing(loaded: LoadedConfig, number: int, address: MeetingAddress) -> SharingEngine:
    """Build the engine of a replica of one rank, while the others build theirs, and let it run in step with them.

    Raises:
        SlotlineError: of the kind that fits.
    """
    planned = make_plan(loaded, place=place_of(loaded, number))  # its errors are said before the others are met
    group = join_replicas(planned.place, address, loaded.config.parallel.start_timeout)
    engine = build_sharing(planned, group)
    engine.join_others(group, join_meetings(group, PATIENCE * loaded.config.parallel.timeout))
    return engine


def build_sharing(planned: Planned, group: Ranks) -> SharingEngine:
    """Build the engine of a replica, while the others of the group build theirs.

    Raises:
        SlotlineError: of the kind that fits.
    """
    engine = build_engine(planned.loaded, group, SharingEngine, planned)
    assert isinstance(engine, SharingEngine)
    engine.planned, engine.balance = planned, build_expert_balance(planned, engine.runner.model)
    engine.make_way()
    return engine
