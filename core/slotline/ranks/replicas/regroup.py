"""Change of the number of replicas that share experts, while requests are unfinished.

All replicas are asked for it. Those that run in step go on with forward passes until each has been asked, and leave
their group after the same one. Replicas that are to leave give away their experts before that, and new ones get theirs
once they have joined. No request notices: attention and the cache are each replica's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from attrs import evolve

from slotline.builder.communicators import build_communicators
from slotline.core.engine.engine import Engine
from slotline.kernels.device_scope import on_device
from slotline.planner.experts import counts_experts, with_experts
from slotline.planner.plan import Planned, make_plan
from slotline.planner.ranks import shard_of
from slotline.ranks.expert_balance import build_expert_balance, build_placement, placements_of
from slotline.ranks.group import RankGroup
from slotline.ranks.replicas.lone import LoneGroup
from slotline.ranks.replicas.meetings import join_meetings
from slotline.ranks.replicas.sharing import PATIENCE, MeetingAddress, build_sharing, join_replicas, place_of
from slotline.ranks.replicas.sharing_engine import SharingEngine
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import Communicator

Array = np.ndarray[Any, Any]


class Share(NamedTuple):
    """What a replica tells the others of its experts.

    Attributes:
        loads: tokens of each expert over all replicas, [experts] float64 for each mixture. None if it has counted none.
        held: the experts in its slots, [slots] int64 for each mixture.
    """

    loads: list[Array] | None
    held: list[Array]


def start_alone(loaded: LoadedConfig, number: int) -> SharingEngine:
    """Build the engine of a replica that joins the others later, by `regroup`. It takes no requests before.

    Raises:
        SlotlineError: of the kind that fits.
    """
    planned = make_plan(loaded, place=place_of(loaded, number))
    return build_sharing(planned, LoneGroup(planned.place))


def can_regroup(engine: Engine) -> bool:
    """Return True if the model of a replica lets another number of replicas share its experts."""
    return all(hasattr(engine.runner.model, name) for name in ("join_experts", "resize_experts"))


def regroup(engine: Engine, loaded: LoadedConfig, address: MeetingAddress) -> int:
    """Have a replica share experts with as many replicas as a configuration says. All of them are asked for it.

    Args:
        loaded: the configuration of the replicas from now on.
        address: where they meet.

    Returns:
        The number of experts that came from other replicas to this one.

    Raises:
        RankError: if the others cannot be reached.
        PluginError: if the experts cannot be placed.
        ModelError: if they cannot move.
    """
    assert isinstance(engine, SharingEngine)
    return _regroup(engine, loaded, address)


@on_device
def _regroup(engine: SharingEngine, loaded: LoadedConfig, address: MeetingAddress) -> int:
    assert engine.planned is not None
    model: Any = engine.runner.model
    number, parallel = engine.planned.place.rank, loaded.config.parallel
    planned = evolve(engine.planned, loaded=loaded, place=place_of(loaded, number))
    shrinks, stays = parallel.data < engine.planned.loaded.config.parallel.data, number < parallel.data
    if engine.meetings is not None:
        engine.leave_together()
    own = _own_share(engine)
    if not shrinks:
        group = _join(engine, planned, address)
    assert engine.group is not None or not shrinks
    shares: list[Share] = (engine.group if shrinks else group).gather(own)  # type: ignore[union-attr]
    placements = _placements(planned, shares)
    held = [[share.held[index] for share in shares] for index in range(len(placements))]
    shard = with_experts(loaded, shard_of(planned.place)) if stays else None
    came: int = model.resize_experts(held, placements, parallel.data, shard)
    if shrinks:
        if not stays:
            engine.leave_others()
            return came
        group = _join(engine, planned, address)
    engine.planned = planned
    engine.balance = build_expert_balance(planned, model)
    engine.join_others(group, join_meetings(group, PATIENCE * parallel.timeout))
    engine.capture_again()
    return came


def _own_share(engine: SharingEngine) -> Share:
    """Return what this replica has of the experts, and what the replicas have counted."""
    model: Any = engine.runner.model
    assert engine.planned is not None
    before, number = engine.planned.loaded.config.parallel.data, engine.planned.place.rank
    loads = None
    if engine.meetings is not None and counts_experts(engine.planned.loaded):
        loads = [one.cpu().numpy().astype(np.float64) for one in model.expert_loads()]
    return Share(loads, [np.asarray(one).reshape(before, -1)[number] for one in model.expert_placements()])


def _join(engine: SharingEngine, planned: Planned, address: MeetingAddress) -> RankGroup:
    """Leave a group for another one, whose replicas do the same."""
    engine.leave_others()
    group = join_replicas(planned.place, address, planned.loaded.config.parallel.start_timeout)
    communicator: Communicator = build_communicators(planned, group)["data"]
    model: Any = engine.runner.model
    model.join_experts(communicator)
    return group


def _placements(planned: Planned, shares: Sequence[Share]) -> list[Array]:
    """Return the expert of each slot [slots] int64 for each mixture, near to where the experts are."""
    numbers = [1 + max(int(share.held[index].max()) for share in shares) for index in range(len(shares[0].held))]
    loads = shares[0].loads or [np.ones(number) for number in numbers]
    parallel = planned.loaded.config.parallel
    descriptor = planned.expert_placement.descriptor
    assert descriptor is not None
    asked = placements_of(descriptor, build_placement(planned, descriptor), loads, parallel.redundant_experts)
    return [
        settled_on(placement, [share.held[index] for share in shares], parallel.data)
        for index, placement in enumerate(asked)
    ]


def settled_on(placement: Array, held: Sequence[Array], ranks: int) -> Array:
    """Return a placement as good that moves less: parts go to the ranks that have most of them.

    Args:
        placement: the expert of each slot, [slots] int64.
        held: the experts that each rank has now, [slots] int64.
        ranks: number of ranks that are to have them.
    """
    parts, homes = placement.reshape(ranks, -1), held[:ranks]
    common = np.array([[len(np.intersect1d(part, home)) for home in homes] for part in parts])
    result = np.empty_like(parts)
    for _ in range(ranks):
        part, rank = np.unravel_index(np.argmax(common), common.shape)
        common[part, :] = common[:, rank] = -1
        result[rank] = _in_place(parts[part], homes[int(rank)])
    return result.reshape(-1)


def _in_place(part: Array, home: Array) -> Array:
    """Return the experts of a rank, those that it has in their slots if these stay."""
    left, result, free = list(part.tolist()), part.copy(), []
    for slot in range(len(part)):
        expert = home[slot] if slot < len(home) else -1
        if expert in left:
            left.remove(expert)
            result[slot] = expert
        else:
            free.append(slot)
    result[free] = left
    return result
