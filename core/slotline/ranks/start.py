"""Start of an engine, over as many ranks as its configuration asks for."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import NoReturn, Protocol
from weakref import finalize, ref

import torch
from torch.distributed.distributed_c10d import Store

from slotline.builder.engine_builder import build_engine
from slotline.core.engine.engine import Engine
from slotline.planner.plan import Planned, make_plan
from slotline.planner.ranks import layout_of
from slotline.ranks.expert_balance import build_expert_balance
from slotline.ranks.group import (
    RankGroup,
    join_launched,
    join_store,
    launched_place,
    refuse_other_group,
    refuse_without_gloo,
    waits_in,
)
from slotline.ranks.launchers import Launcher, Others, Started, choose_launcher, start_ranks
from slotline.ranks.links import Link, Links
from slotline.ranks.logs import log_as
from slotline.ranks.ranked_engine import RankedEngine
from slotline.ranks.roles import follows_rank_0, is_left_to_rank_0
from slotline.ranks.stacks import lost_others
from slotline.ranks.watch import Watch
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import ConfigError, SlotlineError
from slotline.registry.ranks import Place, refuse_other_size

_CAUSE = 2.0
"""Seconds in which the watch finds out why rank 0 has lost another rank."""
_LEAVE = 5.0
"""Seconds that a rank has to leave a collective whose other ranks are gone."""
_running: list[ref[RankedEngine]] = []


class RankForm(Protocol):
    """How the ranks that rank 0 starts find each other."""

    def place(self, loaded: LoadedConfig) -> Place:
        """Return the place of a process that rank 0 started."""
        ...

    def start(self, launcher: Launcher, planned: Planned, timeout: float) -> Started:
        """Start the other ranks."""
        ...

    def join(self, place: Place, store: Store, timeout: float) -> RankGroup:
        """Join all ranks."""
        ...

    def build(self, planned: Planned, group: RankGroup, links: Links | None, link: Link | None) -> RankedEngine:
        """Build the engine of one rank, while the others build theirs."""
        ...


class PlainRanks:
    """Ranks of one engine. See `RankForm`."""

    def place(self, loaded: LoadedConfig) -> Place:
        """Return the place of a process that rank 0 started."""
        place = launched_place(layout_of(loaded))
        assert place is not None
        return place

    def start(self, launcher: Launcher, planned: Planned, timeout: float) -> Started:
        """Start the other ranks."""
        return start_ranks(launcher, planned, timeout)

    def join(self, place: Place, store: Store, timeout: float) -> RankGroup:
        """Join all ranks."""
        return join_store(place, store, timeout)

    def build(self, planned: Planned, group: RankGroup, links: Links | None, link: Link | None) -> RankedEngine:
        """Build the engine of one rank, while the others build theirs."""
        return build_rank(planned, group, links, link, logged=True)


def start_engine(loaded: LoadedConfig, first: int | None = None) -> Engine:
    """Build an engine. With several ranks, start those that torchrun has not started, by `parallel.launcher`.

    Under torchrun every rank runs the same program and gets the same outputs. Otherwise this process is rank 0, and the
    others do what it is asked to do.

    Args:
        first: number of the device of rank 0 on its machine, for a replica. None for an engine without others.

    Raises:
        SlotlineError: of the kind that fits. No process is left then.
        SystemExit: in a process that only follows rank 0, once rank 0 has ended.
    """
    layout, launcher = layout_of(loaded), choose_launcher(loaded) if first is None else "local"
    own = Place(layout=layout, local_rank=first or 0)
    if first is None and is_left_to_rank_0():
        refuse_other_size(layout, int(os.environ["WORLD_SIZE"]))
    if layout.size == 1:
        return build_engine(loaded, planned=make_plan(loaded, place=own)) if first else build_engine(loaded)
    refuse_without_gloo()
    _refuse_second()
    place = launched_place(layout) if launcher == "torchrun" else None
    if place is None:
        return lead(loaded, own, launcher, PlainRanks())
    return _follow(loaded, place) if follows_rank_0() else _start_launched(loaded, place, logged=is_left_to_rank_0())


def end_engine(engine: Engine) -> None:
    """End the other ranks of an engine, if it has any. It takes no more requests then."""
    if isinstance(engine, RankedEngine):
        engine.close()


def failure_of(engine: Engine) -> SlotlineError | None:
    """Return what ended the ranks of an engine, None while they work."""
    return engine.failure if isinstance(engine, RankedEngine) else None


def build_rank(
    planned: Planned, group: RankGroup, links: Links | None, link: Link | None, *, logged: bool
) -> RankedEngine:
    """Build the engine of one rank, while the others build theirs.

    Raises:
        SlotlineError: of the kind that fits.
    """
    share_threads(planned)
    engine = build_engine(planned.loaded, group, RankedEngine, planned)
    assert isinstance(engine, RankedEngine)
    engine.balance = build_expert_balance(planned, engine.runner.model)
    engine.connect(group, links, link, logged=logged)
    return engine


def share_threads(planned: Planned) -> None:
    """Give the ranks of this machine that serve the same requests a part of the threads on the CPU each."""
    if planned.on_host:
        here = planned.place.layout.replica_size // planned.loaded.config.parallel.nodes
        torch.set_num_threads(max(1, torch.get_num_threads() // here))


def lead(loaded: LoadedConfig, place: Place, launcher: Launcher, form: RankForm) -> RankedEngine:
    """Build the engine of rank 0, and start the other ranks for it.

    Args:
        place: of rank 0.

    Raises:
        SlotlineError: of the kind that fits. No other process is left then.
    """
    refuse_other_group()
    parallel = loaded.config.parallel
    planned = make_plan(loaded, place=place)  # its errors are said before anything starts
    started = form.start(launcher, planned, parallel.start_timeout)
    launched, store = started.others, started.store
    group = links = None
    try:
        if started.place != place:
            place = started.place
            planned = make_plan(loaded, place=place)
        links = Links(store, place, parallel.timeout, parallel.start_timeout, started.host)
        links.on_failure(launched.end)
        links.accept(launched.ended)
        links.await_planned()
        links.watch.group = group = form.join(place, store, parallel.start_timeout)
        links.on_failure(group.abort)
        engine = form.build(planned, group, links, None)
    except BaseException as error:
        cause = _cause(error, links, group)
        _end(launched, links, group)
        raise cause from (None if cause is error else error)
    return _ended_by(engine, partial(_end, launched, links, group, patience=2.0))


def _start_launched(loaded: LoadedConfig, place: Place, *, logged: bool) -> RankedEngine:
    """Build the engine of a rank that torchrun started."""
    parallel = loaded.config.parallel
    group = join_launched(place, parallel.start_timeout)
    links = link = None
    try:
        if place.rank == 0:
            links = Links(group.store, place, parallel.timeout, parallel.start_timeout, os.environ["MASTER_ADDR"])
            links.on_failure(links.watch.kill_stopped)
            links.on_failure(group.abort)
            links.on_failure(partial(_leave_collective, links.watch))
            links.accept(lambda: None)
            links.watch.group = group
        else:
            link = Link(group.store, place.rank, lambda: None)
            link.on_end, link.group = partial(_leave_collective, link), group
        engine = build_rank(make_plan(loaded, place=place), group, links, link, logged=logged)
    except BaseException as error:
        if link is not None:
            link.failed(error)
        cause = _cause(error, links, group)
        _leave(links or link, group)
        raise cause from (None if cause is error else error)
    return _ended_by(engine, partial(_leave, links or link, group))


def _follow(loaded: LoadedConfig, place: Place) -> NoReturn:
    """Follow rank 0, which alone runs the command that torchrun started in all ranks."""
    log_as(f"rank {place.rank}")
    engine = _start_launched(loaded, place, logged=True)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all, and rank 0 decides
    engine.follow()
    engine.close()
    raise SystemExit(0)


def _ended_by(engine: RankedEngine, end: partial[None]) -> RankedEngine:
    """Have the other ranks end with an engine."""
    engine.end = finalize(engine, end)
    _running[:] = [ref(engine)]
    return engine


def _refuse_second() -> None:
    """Refuse a second engine over ranks in this process.

    Raises:
        ConfigError: if the first one works.
    """
    if _running and _running[0]() is not None:
        gc.collect()  # it may be part of a cycle
    engine = _running[0]() if _running else None
    if engine is None:
        return
    if engine.failure is None and getattr(engine.end, "alive", False):
        raise ConfigError(
            "an engine over several ranks runs in this process already",
            fix="close it first, or start the second one in another process",
        )
    engine.close()


def _cause(error: BaseException, links: Links | None, group: RankGroup | None) -> BaseException:
    """Return the failure of the rank that rank 0 has lost, else the error itself."""
    if links is not None and lost_others(error, waits_in(group)) and links.failed.wait(_CAUSE):
        return links.error()
    return error


def _end(launched: Others, links: Links | None, group: RankGroup | None, patience: float = 0.0) -> None:
    """End the other ranks, which rank 0 started."""
    if links is not None:
        links.close()
    launched.end(patience)
    if group is not None:
        group.close()


def _leave(links: Links | Link | None, group: RankGroup) -> None:
    """Leave the ranks that torchrun started."""
    if links is not None:
        links.close()
    group.close()


def _leave_collective(rank: Watch | Link) -> None:
    """End this process, which torchrun started, if its main thread does not leave a collective by itself."""

    def wait() -> None:
        time.sleep(_LEAVE)
        if rank.within or rank.building:
            said = rank.failure if isinstance(rank, Link) else rank.error(0)
            with suppress(Exception):
                sys.stderr.write(f"error: {said}\n")
                sys.stderr.flush()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
