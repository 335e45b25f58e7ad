"""Replicas that share experts come and go: the front's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import TYPE_CHECKING

from attrs import define, evolve

from slotline.planner.plan import make_plan
from slotline.planner.ranks import layout_of
from slotline.ranks.replicas.growth import Growth, resized
from slotline.ranks.replicas.regroup import can_regroup, regroup
from slotline.ranks.replicas.replica_links import ReplicaLink
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import ConfigError, RankError, RequestError
from slotline.registry.loading import one_line
from slotline.registry.ranks import Place

if TYPE_CHECKING:
    from slotline.ranks.replicas.replica_front import ReplicaFront
    from slotline.registry.negotiation import Plan


@define(eq=False)
class SharedGrowth(Growth):
    """Start and end of replicas that share the experts of mixtures. All take part in each change."""

    ends_idle = False

    def asked(self, front: ReplicaFront, data: int) -> tuple[LoadedConfig, Plan]:
        """See `Growth.asked`. The experts have as few copies as can be shared evenly."""
        if data < 2:
            raise RequestError("replicas that share experts are two at least", fix="give data=2 or more")
        if (size := layout_of(self.planned.loaded).replica_size) > 1:
            raise RequestError(
                f"replicas of {size} ranks (parallel.tensor) that share experts keep their number",
                fix="build the engine again with another parallel.data and parallel.expert",
            )
        if any(module.experts for module in self.planned.whole.weight_modules):
            raise RequestError("experts with quantized weights do not move", fix="build the engine again")
        if self.planned.drafter is not None and front.plan.graphs.resolved != "none":
            raise RequestError(
                "the drafter's captured steps read those of the model, which are captured anew",
                fix='set graphs.mode = "none", or build the engine again',
            )
        if not front.ask_first(can_regroup):
            family = self.planned.family_descriptor.name
            raise RequestError(f"model family {family!r} cannot move experts to other replicas", fix="start anew")
        loaded = self._with_slots(resized(self.planned.loaded, data))
        return loaded, make_plan(loaded, place=Place(layout=layout_of(loaded))).plan

    def join(self, front: ReplicaFront, loaded: LoadedConfig, new: Sequence[ReplicaLink]) -> None:
        """See `Growth.join`. The replicas get their experts before."""
        _regroup(front, loaded, new)
        super().join(front, loaded, new)

    def shrink(self, front: ReplicaFront, loaded: LoadedConfig, pause: Callable[[], object]) -> None:
        """Wait until replicas above the number have no requests, and end them. `pause` is called while they have."""
        data = loaded.config.parallel.data
        front.exclusively(front.router.choose_among, data)
        while not front.exclusively(_give_up_last, front, loaded):
            pause()

    def _with_slots(self, loaded: LoadedConfig) -> LoadedConfig:
        """Return a configuration whose replicas can share the slots evenly, with as few copies more as possible."""
        config, parallel = loaded.config, loaded.config.parallel
        experts = set(self.planned.whole.mixtures)
        for copies in range(parallel.redundant_experts, parallel.redundant_experts + parallel.data):
            if all((one + copies) % parallel.data == 0 for one in experts):
                fitting = evolve(parallel, expert=parallel.data, redundant_experts=copies)
                return evolve(loaded, config=evolve(config, parallel=fitting))
        raise ConfigError(
            f"{parallel.data} replicas cannot share mixtures of {sorted(experts)} experts evenly",
            fix="take another number of replicas",
        )


def _give_up_last(front: ReplicaFront, loaded: LoadedConfig) -> bool:
    """End the replicas above the number of a configuration. Return False if one has requests."""
    data = loaded.config.parallel.data
    if any(one.replica >= data for one in front.rows.requests.values()):
        return False
    if front.failure is not None:
        raise front.failure
    _regroup(front, loaded, ())
    front.end_last(data)
    return True


def _regroup(front: ReplicaFront, loaded: LoadedConfig, new: Sequence[ReplicaLink]) -> None:
    """Have all replicas share their experts anew, while no other thread is in the front.

    Raises:
        RankError: if one could not, which ends all.
    """
    links = front.links
    asked = [*links.replicas, *new]
    futures = links.call(regroup, loaded, links.next_meeting(), to=asked)
    done, late = wait(futures, 2 * loaded.config.parallel.start_timeout, FIRST_EXCEPTION)
    error = next((error for one in done if (error := one.exception()) is not None), None)
    if error is not None or late:
        what = "replicas could not share experts anew" + (f": {one_line(error)}" if error else " in time")
        links.fail(links.replicas[0], what, error)
        raise front.failure or RankError(what, fix="build the engine again")
