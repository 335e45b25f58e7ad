"""Replicas of several ranks that share experts.

The ranks of a replica serve the same requests, as in an engine of its own. Each meets the ranks of its place in the
other replicas before a forward pass. All places come to the same meetings, so that nothing of them is told.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

from attrs import define, evolve, frozen
from torch import distributed
from torch.distributed.distributed_c10d import Store

from slotline.builder.engine_builder import build_engine
from slotline.core.engine.engine_lock import exclusive
from slotline.planner.plan import Planned
from slotline.planner.ranks import layout_of
from slotline.ranks.group import RankGroup
from slotline.ranks.launch import TOLD, start_others
from slotline.ranks.launchers import Launcher, Started
from slotline.ranks.links import Link, Links
from slotline.ranks.ranked_engine import RankedEngine
from slotline.ranks.replicas.meetings import join_meetings
from slotline.ranks.replicas.sharing import PATIENCE, MeetingAddress, join_replicas, place_of
from slotline.ranks.replicas.sharing_engine import SharingEngine
from slotline.ranks.start import lead, share_threads
from slotline.registry.config import LoadedConfig
from slotline.registry.ranks import Place, RankLayout

_PROGRAM = "slotline.ranks.replicas.sharing_follower"


@define(kw_only=True, eq=False, slots=False)
class SharingRankedEngine(SharingEngine, RankedEngine):
    """Engine of one rank of a replica that shares experts. Rank 0 of the replica is asked, and the others follow it."""

    @property
    def is_awaited(self) -> bool:
        """See `SharingEngine.is_awaited`. Ranks that follow are told when they are."""
        return self.link is None and super().is_awaited

    @exclusive
    def run_experts(self) -> None:
        """See `SharingEngine.run_experts`."""
        with self.told_step("run_experts"):
            super().run_experts()


@frozen
class SharedRanks:
    """Ranks of one replica of several. See `slotline.ranks.start.RankForm`.

    Attributes:
        replica: its number.
        address: where all ranks of all replicas meet.
    """

    replica: int
    address: MeetingAddress

    def place(self, loaded: LoadedConfig) -> Place:
        """Return the place of a process that rank 0 of the replica started."""
        return self._place(loaded, int(os.environ["RANK"]))

    def start(self, launcher: Launcher, planned: Planned, timeout: float) -> Started:
        """Start the other ranks of the replica."""
        others, store = start_others(planned.place, planned.loaded, timeout, _PROGRAM, self)
        return Started(others=others, store=store, place=planned.place)

    def join(self, place: Place, store: Store, timeout: float) -> RankGroup:
        """Join all ranks of all replicas."""
        group = join_replicas(place, self.address, timeout)
        tensor = place.layout.tensor
        first = self.replica * tensor
        within = distributed.new_group(
            list(range(first, first + tensor)), backend="gloo", use_local_synchronization=True
        )
        own = Place(rank=place.rank - first, local_rank=place.local_rank, layout=RankLayout(tensor=tensor))
        group.replica = evolve(group, place=own, within=within)
        return group

    def build(self, planned: Planned, group: RankGroup, links: Links | None, link: Link | None) -> SharingRankedEngine:
        """Build the engine of one rank, while the others of all replicas build theirs."""
        share_threads(planned)
        engine = build_engine(planned.loaded, group, SharingRankedEngine, planned)
        assert isinstance(engine, SharingRankedEngine)
        assert group.replica is not None
        engine.planned = planned
        engine.make_way()
        meetings = join_meetings(_Column(group), PATIENCE * planned.loaded.config.parallel.timeout)
        engine.connect(group.replica, links, link, logged=True)
        engine.join_others(group.replica, meetings)
        return engine

    def lead(self, loaded: LoadedConfig) -> RankedEngine:
        """Build the engine of rank 0 of the replica, and start its other ranks.

        Raises:
            SlotlineError: of the kind that fits. No other process is left then.
        """
        return lead(loaded, self._place(loaded, 0), "local", self)

    def _place(self, loaded: LoadedConfig, rank: int) -> Place:
        return place_of(loaded, self.replica * layout_of(loaded).replica_size + rank)


@frozen(eq=False)
class _Column:
    """Ranks of the same place in all replicas. All columns gather at the same time."""

    group: RankGroup

    @property
    def place(self) -> Place:
        """This rank's place among them."""
        layout = self.group.place.layout
        return Place(rank=self.group.place.index("data"), layout=RankLayout(data=layout.data))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all of them, in order."""
        found = self.group.gather(value)
        return [found[rank] for rank in self.group.place.group("data")]


def told_ranks(store: Store) -> SharedRanks:
    """Return what rank 0 told of the ranks of its replica."""
    told: SharedRanks = pickle.loads(bytes.fromhex(store.get(TOLD).decode()))
    return told
