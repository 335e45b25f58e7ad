"""Choice of what starts the other ranks of an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, Protocol

from attrs import frozen
from torch.distributed.distributed_c10d import Store

from slotline.planner.plan import Planned
from slotline.planner.ranks import layout_of
from slotline.ranks.group import launched_place
from slotline.ranks.launch import start_others
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import ConfigError
from slotline.registry.ranks import Place, RankLayout

Launcher = Literal["local", "torchrun", "ray"]
KEY = "parallel.launcher"


class Others(Protocol):
    """Other ranks of an engine, which rank 0 started."""

    def ended(self) -> str | None:
        """Return what happened to a rank that has ended, None while all run."""
        ...

    def end(self, patience: float = 0.0) -> None:
        """End the ranks, after this many seconds in which they may end by themselves. Further calls do nothing."""
        ...


@frozen(kw_only=True)
class Started:
    """Start of the other ranks.

    Attributes:
        others: the ranks.
        store: key-value store that they reach, served by rank 0.
        place: rank 0, on the device that is kept for it.
        host: address of rank 0 that they reach.
    """

    others: Others
    store: Store
    place: Place
    host: str = "127.0.0.1"


def choose_launcher(loaded: LoadedConfig, environment: Mapping[str, str] = os.environ) -> Launcher:
    """Return what starts the ranks.

    'auto' is torchrun in its processes. Elsewhere it is this process for one node, and Ray for several.

    Raises:
        ConfigError: if the launcher cannot start the ranks that the configuration asks for.
    """
    parallel, layout = loaded.config.parallel, layout_of(loaded)
    asked, nodes = parallel.launcher, parallel.nodes
    if layout.size % nodes:
        raise ConfigError(
            f"parallel.nodes = {nodes} does not divide {layout.size} ranks",
            fix="give each node the same number of ranks",
        )
    inside = layout.size > 1 and asked in ("auto", "torchrun") and launched_place(layout, environment) is not None
    if asked == "torchrun" and layout.size > 1 and not inside:
        raise ConfigError(
            f"{KEY} = 'torchrun' in a process that torchrun did not start",
            fix=f'start the program with torchrun --nproc-per-node {layout.size // nodes}, or set {KEY} = "auto"',
        )
    if asked == "local" and nodes > 1:
        raise ConfigError(
            f"{KEY} = 'local' starts processes on this machine, and parallel.nodes = {nodes}",
            fix=f'set {KEY} = "ray", or start the program on each node with torchrun',
        )
    if inside:
        _refuse_other_nodes(layout, nodes, environment)
        return "torchrun"
    if asked == "auto":
        return "ray" if nodes > 1 else "local"
    return asked


def start_ranks(launcher: Launcher, planned: Planned, timeout: float) -> Started:
    """Start the other ranks.

    Raises:
        ConfigError: if what starts them is not installed, or the configuration cannot be sent.
        RankError: if they cannot be started.
    """
    if launcher == "ray":
        from slotline.ranks.ray_launch import start_actors

        actors, store = start_actors(planned, timeout)
        return Started(others=actors, store=store, place=actors.place, host=actors.host)
    others, store = start_others(planned.place, planned.loaded, timeout)
    return Started(others=others, store=store, place=planned.place)


def refuse_replicas_elsewhere(loaded: LoadedConfig) -> None:
    """Refuse replicas that are to start on other machines.

    Raises:
        ConfigError: naming what asks for it.
    """
    parallel = loaded.config.parallel
    if parallel.nodes > 1 or parallel.launcher not in ("auto", "local"):
        asked = f"parallel.nodes = {parallel.nodes}" if parallel.nodes > 1 else f"{KEY} = {parallel.launcher!r}"
        raise ConfigError(
            f"{asked} with parallel.data = {parallel.data}, whose replicas start on this machine",
            fix="start a server for each node, or set parallel.data = 1",
        )


def _refuse_other_nodes(layout: RankLayout, nodes: int, environment: Mapping[str, str]) -> None:
    local = int(environment.get("LOCAL_WORLD_SIZE", layout.size // nodes))
    if nodes > 1 and local * nodes != layout.size:
        raise ConfigError(
            f"parallel.nodes = {nodes}, and torchrun started {local} of {layout.size} ranks on this one",
            fix=f"start {layout.size // nodes} processes on each node, or leave out parallel.nodes",
        )
