"""Replicas that come and go while the others run: further ones join the front, and others leave it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from slotline.planner.experts import replicas_share_experts
from slotline.planner.replicas import KEY, refuse_few_devices, replicas_setting
from slotline.ranks.replica_links import ReplicaLink
from slotline.registry.config import LoadedConfig, Origin
from slotline.registry.devices import Devices
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

if TYPE_CHECKING:
    from slotline.ranks.replica_front import ReplicaFront
    from slotline.registry.negotiation import Plan


@frozen(kw_only=True)
class ScaleReport:
    """Replicas after a call of `scale`.

    Attributes:
        data: number of those that take requests.
        started: number of those that were started.
        leaving: number of those that take no more requests, and end with their last.
    """

    data: int
    started: int
    leaving: int


@define(eq=False)
class Growth:
    """Start of further replicas of an engine, one call at a time.

    Attributes:
        loaded: the configuration of the first replicas.
        registry: finds the devices.
    """

    loaded: LoadedConfig
    registry: PluginRegistry
    _scaling: threading.Lock = field(factory=threading.Lock, init=False)

    def scale(self, front: ReplicaFront, data: int) -> ScaleReport:
        """Let so many replicas of a front take requests. See `ReplicaFront.scale`."""
        if not isinstance(data, int) or isinstance(data, bool) or data < 1:
            raise RequestError(f"data={safe_repr(data)} is no positive number", fix="give the number of replicas")
        if replicas_share_experts(self.loaded):
            raise RequestError(
                "the replicas share the experts of mixtures, and their number is fixed", fix="build the engine again"
            )
        with self._scaling:
            loaded = resized(self.loaded, data)
            refuse_few_devices(loaded, Devices(self.registry, loaded))
            before, there = front.exclusively(_keep, front, data)
            started = 0
            try:
                if there < data:
                    started = self._grow(front, loaded, range(there, data))
            except BaseException:
                front.exclusively(_choose_among, front, before)
                raise
            return front.exclusively(_settle, front, loaded, started)

    def _grow(self, front: ReplicaFront, loaded: LoadedConfig, numbers: Sequence[int]) -> int:
        """Start replicas, and let them take requests once they are as the others. Return their number."""
        reloads = front.reloads
        new = front.links.start(loaded, with_replicas(front.plan, loaded).digest, numbers)
        try:
            known = None
            while not front.exclusively(_join, front, new, known):
                known = _changes(front)
                front.teach(new, reloads)
        except BaseException:
            front.links.drop(new, numbers)
            raise
        return len(new)


def resized(loaded: LoadedConfig, data: int) -> LoadedConfig:
    """Return a configuration with another number of replicas."""
    config = loaded.config
    parallel = evolve(config.parallel, data=data)
    origins = {**loaded.origins, KEY: Origin(kind="argument", where=f"scale(data={data})")}
    return evolve(loaded, config=evolve(config, parallel=parallel), origins=origins)


def with_replicas(plan: Plan, loaded: LoadedConfig) -> Plan:
    """Return a plan that differs only in the number of replicas, which a configuration says."""
    return evolve(plan, settings=(*(one for one in plan.settings if one.key != KEY), *replicas_setting(loaded)))


def _keep(front: ReplicaFront, data: int) -> tuple[int, int]:
    """Take back as many leaving replicas as are wanted. Return the number that took requests, and of all replicas."""
    if front.failure is not None:
        raise front.failure
    before, there = front.router.chosen_among, len(front.links.replicas)
    front.router.choose_among(max(before, min(data, there)))
    return before, there


def _choose_among(front: ReplicaFront, data: int) -> None:
    """Let the first so many replicas take requests, and end others that have none."""
    front.router.choose_among(data)
    front.end_idle()


def _changes(front: ReplicaFront) -> tuple[int, int]:
    """Return what a new replica has to know, as a number of changes."""
    adapters = front.extension("adapters")
    return front.reloads, 0 if adapters is None else adapters.changes


def _join(front: ReplicaFront, new: Sequence[ReplicaLink], known: tuple[int, int] | None) -> bool:
    """Let new replicas take requests if they know everything."""
    if known != _changes(front):
        return False
    front.links.join(new)
    front.router.choose_among(len(front.links.replicas))
    return True


def _settle(front: ReplicaFront, loaded: LoadedConfig, started: int) -> ScaleReport:
    """Let as many replicas take requests as a configuration says, and show them in the plan."""
    data = loaded.config.parallel.data
    front.plan = with_replicas(front.plan, loaded)
    _choose_among(front, data)
    return ScaleReport(data=data, started=started, leaving=len(front.links.replicas) - data)
