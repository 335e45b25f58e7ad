"""Ray's cluster: the connection to it, and room for the ranks on its nodes."""

from __future__ import annotations

import logging
import os
import time
from importlib import import_module
from math import ceil
from typing import Any

from attrs import frozen

from slotline.planner.plan import Planned
from slotline.registry.errors import ConfigError, RankError
from slotline.registry.loading import one_line

_RESOURCES = {"cpu": "CPU", "cuda": "GPU"}
"""Ray's names of devices. Others are asked for by their own name in capitals."""
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""Ray's options for an actor that needs a resource. Others go into the option `resources`."""
_NOTICE = 5.0
"""Seconds of waiting for room after which a warning says what is missing."""
logger = logging.getLogger("slotline")


@frozen(kw_only=True)
class Room:
    """What the ranks need of Ray.

    Attributes:
        size: number of ranks.
        nodes: number of nodes, which divides it.
        resource: Ray's name of the device that each rank needs.
    """

    size: int
    nodes: int
    resource: str

    @property
    def per_node(self) -> int:
        """Return the number of ranks of each node."""
        return self.size // self.nodes

    @property
    def request(self) -> dict[str, Any]:
        """Return the options of the actor of one rank."""
        option = _OPTIONS.get(self.resource)
        return {"num_cpus": 0, **({option: 1} if option else {"resources": {self.resource: 1}})}

    @property
    def missing(self) -> str:
        """Return what is asked for, and what there is."""
        ray = package()
        totals = ", ".join(
            f"{node['Resources'].get(self.resource, 0):g} on {node['NodeManagerAddress']}"
            f"{' (this one)' if node['NodeID'] == this_node() else ''}"
            for node in ray.nodes()
            if node["Alive"]
        )
        nodes = "this node" if self.nodes == 1 else f"each of {self.nodes} nodes, this one among them"
        return (
            f"{self.size} ranks need {self.per_node} {self.resource} on {nodes}; Ray has {totals}, of which "
            f"{ray.available_resources().get(self.resource, 0):g} are free"
        )


def room_for(planned: Planned) -> Room:
    """Return what the ranks of a plan need."""
    device = planned.device.partition(":")[0]
    return Room(
        size=planned.place.size,
        nodes=planned.loaded.config.parallel.nodes,
        resource=_RESOURCES.get(device, device.upper()),
    )


def package() -> Any:
    """Return the module `ray`, which is an extra.

    Raises:
        ConfigError: if it cannot be imported.
    """
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"Ray is to start the ranks (parallel.launcher, parallel.nodes), and cannot be imported: {error}",
            fix="pip install slotline[ray], or start the program on each node with torchrun",
        ) from error


def connect(nodes: int) -> bool:
    """Connect this process to Ray, and return whether it was not connected before.

    One node needs no running cluster: Ray starts one on this machine.

    Raises:
        ConfigError: if Ray is not installed, or this process is only a client of the cluster.
        RankError: if no cluster is reached.
    """
    ray = package()
    if ray.util.client.ray.is_connected():
        raise ConfigError(
            "this process is a client of Ray (ray://), and rank 0 must be on a node of the cluster",
            fix="run the program on a node of the cluster, or as a job",
        )
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send statistics to its makers
    address = os.environ.get("RAY_ADDRESS") or ("auto" if nodes > 1 else None)
    try:
        ray.init(address=address, logging_level="WARNING")
    except (OSError, RuntimeError, ValueError) as error:
        raise RankError(
            f"no cluster of Ray is reached: {one_line(error)}",
            fix="run `ray start` on each node and the program on one of them, or set RAY_ADDRESS",
        ) from error
    return True


def this_node() -> str:
    """Return Ray's name of the node of this process."""
    return str(package().get_runtime_context().get_node_id())


def this_address() -> str:
    """Return the address of this node that Ray's other nodes reach."""
    return str(package().util.get_node_ip_address())


def begin_group(room: Room) -> Any:
    """Ask for a placement group with a bundle on each node, the first one on this node."""
    bundles = [{room.resource: room.per_node}] * room.nodes
    selectors = [{"ray.io/node-id": this_node()}, *[{}] * (room.nodes - 1)]
    return package().util.placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=selectors)


def await_group(group: Any, room: Room, until: float) -> None:
    """Wait until a placement group is there.

    Raises:
        RankError: naming what is missing, if there is no room in time.
    """
    if group.wait(ceil(min(_NOTICE, until - time.monotonic()))):  # Ray waits for whole seconds
        return
    if (left := until - time.monotonic()) > 0:
        logger.warning("waiting for room in Ray, at most %.0f s: %s", left, room.missing)
        if group.wait(ceil(left)):
            return
    raise RankError(
        f"Ray has no room within parallel.start_timeout: {room.missing}",
        fix="add or free nodes, correct parallel.nodes, or raise parallel.start_timeout",
    )


def number_of(device: str, rank: int) -> int:
    """Return the number of a device that Ray gave to a rank.

    Raises:
        RankError: if Ray names its devices otherwise.
    """
    try:
        return int(device)
    except ValueError:
        raise RankError(
            f"Ray gives rank {rank} the device {device!r}, which is no number",
            fix="start Ray on its node without CUDA_VISIBLE_DEVICES, or with numbers in it",
        ) from None


def number_here(device: int) -> int:
    """Return a device's number among those that this process sees.

    Raises:
        RankError: if it does not see it.
    """
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not names:
        return device
    if str(device) not in names:
        raise RankError(
            f"Ray gives rank 0 the device {device}, and this process sees {', '.join(names)}",
            fix="start the program without CUDA_VISIBLE_DEVICES",
        )
    return names.index(str(device))
