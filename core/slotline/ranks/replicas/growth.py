"""Replicas that come and go while the others run: further ones join the front, and others leave it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from attrs import define, evolve, field, frozen

from slotline.planner.plan import Planned
from slotline.planner.replicas import KEY, refuse_few_devices, replicas_setting
from slotline.ranks.replicas.replica_links import ReplicaLink
from slotline.registry.config import LoadedConfig, Origin
from slotline.registry.devices import Devices
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

if TYPE_CHECKING:
    from slotline.ranks.replicas.replica_front import ReplicaFront
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
    """Start and end of replicas of an engine, one change at a time.

    Attributes:
        planned: of the first replicas.
        ends_idle: whether a leaving replica may end as soon as it has no requests.
    """

    planned: Planned
    ends_idle: ClassVar[bool] = True
    _scaling: threading.Lock = field(factory=threading.Lock, init=False)

    def scale(self, front: ReplicaFront, data: int, pause: Callable[[], object]) -> ScaleReport:
        """Let so many replicas of a front take requests. See `ReplicaFront.scale`."""
        if not isinstance(data, int) or isinstance(data, bool) or data < 1:
            raise RequestError(f"data={safe_repr(data)} is no positive number", fix="give the number of replicas")
        with self._scaling:
            loaded, plan = self.asked(front, data)
            before, there = front.exclusively(_keep, front, data)
            try:
                if there < data:
                    self._grow(front, loaded, plan.digest, range(there, data))
                elif there > data:
                    self.shrink(front, loaded, pause)
            except BaseException:
                front.exclusively(front.choose_among, before)
                raise
            front.plan = plan
            left = front.exclusively(front.choose_among, data)
            return ScaleReport(data=data, started=max(0, data - there), leaving=left)

    def asked(self, front: ReplicaFront, data: int) -> tuple[LoadedConfig, Plan]:
        """Return the configuration and the plan of so many replicas.

        Raises:
            SlotlineError: if there cannot be so many.
        """
        loaded = resized(self.planned.loaded, data)
        refuse_few_devices(loaded, Devices(self.planned.registry, loaded))
        return loaded, with_replicas(front.plan, loaded)

    def join(self, front: ReplicaFront, loaded: LoadedConfig, new: Sequence[ReplicaLink]) -> None:
        """Let replicas that know everything take requests, while no other thread is in the front."""
        front.links.join(new)
        front.choose_among(len(front.links.replicas))

    def shrink(self, front: ReplicaFront, loaded: LoadedConfig, pause: Callable[[], object]) -> None:
        """Do nothing, since replicas that take no more requests end with their last."""

    def _grow(self, front: ReplicaFront, loaded: LoadedConfig, digest: str, numbers: Sequence[int]) -> None:
        """Start replicas, and let them take requests once they are as the others."""
        reloads = front.reloads
        new = front.links.start(loaded, digest, numbers)

        def join() -> bool:
            if known != _changes(front):
                return False
            self.join(front, loaded, new)
            return True

        try:
            known: tuple[int, int] | None = None
            while not front.exclusively(join):
                known = _changes(front)
                front.teach(new, reloads)
        except BaseException:
            front.links.drop(new, numbers)
            raise


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


def _changes(front: ReplicaFront) -> tuple[int, int]:
    """Return what a new replica has to know, as a number of changes."""
    adapters = front.extension("adapters")
    return front.reloads, 0 if adapters is None else adapters.changes
