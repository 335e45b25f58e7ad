"""The group of all ranks: what they tell each other on the host while an engine is built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from attrs import define, field
from torch import distributed
from torch.distributed.distributed_c10d import Store

from slotline.ranks.roles import is_launched
from slotline.registry.contracts import Communicator
from slotline.registry.errors import ConfigError, RankError
from slotline.registry.ranks import Place, RankLayout, refuse_other_size


@define(eq=False)
class RankGroup:
    """All ranks of an engine.

    Attributes:
        place: this process.
        store: key-value store that all ranks reach, served by rank 0 or its launcher.
        owner: whether the process group is this object's to end.
        within: the process group of these ranks. None for that of all processes.
        communicators: those of the engine that these ranks build.
        replica: the ranks that serve the same requests. None if all do.
    """

    place: Place
    store: Store
    owner: bool = True
    within: distributed.ProcessGroup | None = None
    communicators: list[Communicator] = field(factory=list)
    replica: RankGroup | None = None

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order. They are pickled."""
        found: list[Any] = [None] * self.place.size
        distributed.all_gather_object(found, value, group=self.within)
        return found

    def gather_bytes(self, value: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in order. All ranks give as many, and at least one."""
        if not self.owner:  # the program's own group may not take tensors of the host
            return self.gather(value)
        given = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        found = [torch.empty_like(given) for _ in range(self.place.size)]
        distributed.all_gather(found, given, group=self.within)
        return [one.numpy().tobytes() for one in found]

    def abort(self) -> None:
        """End the collectives that wait for a rank that is gone. Called by another thread."""
        for communicator in self.communicators:
            communicator.abort()

    def close(self) -> None:
        """Leave the group."""
        for communicator in self.communicators:
            communicator.close()
        if self.owner and distributed.is_initialized():
            with suppress(RuntimeError, ValueError):
                distributed.destroy_process_group()


def waits_in(group: RankGroup | None) -> tuple[object, ...]:
    """Return the objects whose methods wait for other ranks."""
    return () if group is None else (group, *group.communicators)


def launched_place(layout: RankLayout, environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process' place if torchrun started it, else None.

    Raises:
        ConfigError: if torchrun started another number of processes than there are ranks.
    """
    if not is_launched(environment):
        return None
    refuse_other_size(layout, int(environment["WORLD_SIZE"]))
    return Place(
        rank=int(environment["RANK"]),
        local_rank=int(environment["LOCAL_RANK"]),
        layout=layout,
        local_size=int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
    )


def join_launched(place: Place, timeout: float) -> RankGroup:
    """Join the ranks that torchrun started.

    Raises:
        RankError: if the others cannot be reached in time.
    """
    if distributed.is_initialized():
        refuse_other_size(place.layout, distributed.get_world_size())
        return RankGroup(place, _default_store(), owner=False)
    return _join(place, None, timeout)


def join_store(place: Place, store: Store, timeout: float) -> RankGroup:
    """Join the ranks that reach a store.

    Raises:
        ConfigError: if this process already belongs to other ranks.
        RankError: if the others cannot be reached in time.
    """
    refuse_other_group()
    return _join(place, store, timeout)


def refuse_other_group() -> None:
    """Refuse ranks in a process that already belongs to others.

    Raises:
        ConfigError: naming what is there.
    """
    if distributed.is_initialized():
        raise ConfigError(
            "this process already has a process group of torch.distributed",
            fix="close the other engine with ranks first, or start each in a process of its own",
        )


def refuse_without_gloo() -> None:
    """Refuse ranks if they could not reach each other on the host.

    Raises:
        ConfigError: naming what is missing.
    """
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise ConfigError(
            "several ranks need torch.distributed with gloo, and this build of torch has none",
            fix="install a build of torch that has it, as those of pytorch.org, or set the sizes of [parallel] to 1",
        )


def _join(place: Place, store: Store | None, timeout: float) -> RankGroup:
    given: dict[str, Any] = {} if store is None else {"store": store, "rank": place.rank, "world_size": place.size}
    try:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout), **given)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {place.rank} of {place.size} cannot join the others: {error}",
            fix="start all ranks at the same time, with a MASTER_ADDR and a free MASTER_PORT that all of them reach",
        ) from error
    return RankGroup(place, store or _default_store())


def _default_store() -> Store:
    return distributed.distributed_c10d._get_default_store()
