"""Start of the other ranks as actors of Ray."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

import psutil
import torch
from attrs import define, evolve, field
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from slotline.kernels.cpu_threads import cores
from slotline.planner.plan import Planned
from slotline.ranks.launch import CONFIG, packed
from slotline.ranks.ray_room import (
    Room,
    await_group,
    begin_group,
    connect,
    number_here,
    number_of,
    package,
    room_for,
    this_address,
)
from slotline.registry.errors import RankError
from slotline.registry.loading import one_line
from slotline.registry.ranks import Place

_HANDED_ON = ("SLOTLINE_", "HF_", "NCCL_", "TORCH_", "TRITON_", "OMP_NUM_THREADS")
"""Beginnings of the environment variables that the ranks get from rank 0."""
_END = 10.0
"""Seconds that killed actors have to end."""


class RankActor:
    """Process of a rank on one of Ray's nodes. Rank 0 is the user's process, and its actor only keeps its device.

    Its methods run in the main thread.
    """

    def devices(self) -> list[str]:
        """Return the devices that Ray gave to this actor, none for CPUs."""
        given = package().get_runtime_context().get_accelerator_ids()
        return next((list(ids) for ids in given.values() if ids), [])

    def follow(self, environment: dict[str, str]) -> int:
        """Be a rank until rank 0 ends.

        Args:
            environment: variables as torchrun sets them, and those that rank 0 hands on.
        """
        from slotline.ranks.follower import main

        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # a rank reaches its peers' memory, so it sees all devices
        os.environ.update(environment)
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or cores().usable))  # Ray sets 1
        _speak_from(this_address())
        return main()


@define(eq=False)
class Actors:
    """Ranks 1, 2, .. as actors of Ray.

    Attributes:
        host: address of rank 0 that they reach.
        place: rank 0, with the device that Ray keeps for it.
        owner: whether this object connected the process to Ray.
        group: the placement group, None once it is removed.
        actors: the actors by rank.
        running: calls of `RankActor.follow`, with their ranks.
    """

    host: str
    place: Place
    owner: bool
    group: Any = None
    actors: dict[int, Any] = field(factory=dict)
    running: dict[Any, int] = field(factory=dict)

    def ended(self) -> str | None:
        """Return what happened to an actor that has ended, None while all run."""
        ray = package()
        ready, _ = ray.wait(list(self.running), num_returns=1, timeout=0)
        for call in ready:
            try:
                return f"rank {self.running[call]} has ended: it returned {ray.get(call)}"
            except Exception as error:
                return f"rank {self.running[call]} has ended: {_cause(error)}"
        return None

    def end(self, patience: float = 0.0) -> None:
        """End the actors, after this many seconds in which they may end by themselves, and free their resources."""
        ray = package()
        if ray.is_initialized():  # if not, Ray has ended them with this process' connection
            with suppress(Exception):
                self._end(ray, patience)
        if self.owner:
            self.owner = False
            ray.shutdown()

    def _end(self, ray: Any, patience: float) -> None:
        calls, actors, group = list(self.running), list(self.actors.values()), self.group
        self.actors, self.group = {}, None
        if actors and calls:
            ray.wait(calls, num_returns=len(calls), timeout=patience)
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            ray.util.remove_placement_group(group)
        if actors and calls:
            ray.wait(calls, num_returns=len(calls), timeout=_END)


def start_actors(planned: Planned, timeout: float) -> tuple[Actors, Store]:
    """Start the other ranks on Ray's nodes, and return them with the store that they reach.

    Args:
        timeout: seconds until all of them have room and run.

    Raises:
        ConfigError: if Ray is not installed, this process is not on a node of the cluster, or the configuration cannot
            be sent to other processes.
        RankError: if no cluster is reached, it has no room for the ranks, or one cannot be started. No actor and no
            placement group is left then.
    """
    until = time.monotonic() + timeout
    sent, room = packed(planned.loaded), room_for(planned)
    owner = connect(room.nodes)
    actors = Actors(this_address(), planned.place, owner)
    try:
        actors.group = begin_group(room)
        await_group(actors.group, room, until)
        locals_ = _create(actors, room, until, keep_own=not planned.on_host)
        _speak_from(actors.host)
        store = TCPStore(actors.host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        store.set(CONFIG, sent.hex())
        for rank in range(1, room.size):
            given = _environment(rank, locals_[rank], room.size, actors.host, store.port)
            actors.running[actors.actors[rank].follow.remote(given)] = rank
    except BaseException:
        actors.end()
        raise
    return actors, store


def _create(actors: Actors, room: Room, until: float, *, keep_own: bool) -> dict[int, int]:
    """Create the actors, and return each rank's number of its device on its node.

    Args:
        keep_own: whether an actor keeps rank 0's device, so that Ray gives it to nobody else.

    Raises:
        RankError: naming the first rank whose actor does not run in time.
    """
    ray = package()
    strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    for rank in range(0 if keep_own else 1, room.size):
        at = strategy(actors.group, placement_group_bundle_index=rank // room.per_node)
        options = {"max_restarts": 0, "scheduling_strategy": at, **room.request}
        actors.actors[rank] = ray.remote(RankActor).options(**options).remote()
    calls = {rank: actor.devices.remote() for rank, actor in actors.actors.items()}
    found: dict[int, int] = {}
    for rank, call in calls.items():
        try:
            ids = ray.get(call, timeout=max(0.0, until - time.monotonic()))
        except Exception as error:
            raise RankError(
                f"rank {rank} did not start as an actor of Ray: {_cause(error)}",
                fix="give all nodes the same Python and packages, or raise parallel.start_timeout",
            ) from error
        found[rank] = number_of(ids[0], rank) if ids else rank % room.per_node
    if 0 in found:
        actors.place = evolve(actors.place, local_rank=number_here(found[0]))
    return found


def _environment(rank: int, local_rank: int, size: int, host: str, port: int) -> dict[str, str]:
    """Return the environment variables of a rank."""
    return {
        **{name: text for name, text in os.environ.items() if name.startswith(_HANDED_ON)},
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _speak_from(address: str) -> None:
    """Have gloo use the network interface with an address, unless the environment names one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def _cause(error: BaseException) -> str:
    """Return what an error of Ray says, in one line."""
    cause = getattr(error, "cause", None)
    return one_line(cause if isinstance(cause, BaseException) else error)
