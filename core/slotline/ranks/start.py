"""Start of an engine, over as many ranks as its configuration asks for."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial
from weakref import finalize

import torch
from torch.distributed.distributed_c10d import Store

from slotline.builder.engine_builder import build_engine
from slotline.core.engine.engine import Engine
from slotline.planner.plan import Planned, make_plan
from slotline.planner.ranks import layout_of
from slotline.ranks.group import RankGroup, join_launched, join_store, launched_place
from slotline.ranks.launch import Launched, start_others
from slotline.ranks.links import Link, Links
from slotline.ranks.ranked_engine import RankedEngine
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import RankError
from slotline.registry.ranks import Place


def start_engine(loaded: LoadedConfig) -> Engine:
    """Build an engine. With several ranks, start those that torchrun has not started.

    Under torchrun every rank runs the same program and gets the same outputs. Otherwise this process is rank 0, and the
    others do what it is asked to do.

    Raises:
        SlotlineError: of the kind that fits. No process is left then.
    """
    layout = layout_of(loaded)
    if layout.size == 1:
        return build_engine(loaded)
    place = launched_place(layout)
    if place is not None:
        return _start_launched(loaded, place)
    return _lead(loaded, Place(layout=layout))


def _lead(loaded: LoadedConfig, place: Place) -> Engine:
    parallel = loaded.config.parallel
    planned = make_plan(loaded, place=place)  # its errors are said before anything starts
    launched, store = start_others(place, loaded, parallel.start_timeout)
    group = links = None
    try:
        group = _joined(place, store, launched, parallel.start_timeout)
        links = Links(group, parallel.timeout)
        links.accept(launched.ended, parallel.start_timeout)
        links.on_failure(launched.end)
        engine = _built(planned, group, links, None, logged=True)
    except BaseException:
        _end(launched, links, group)
        raise
    finalize(engine, _end, launched, links, group, patience=2.0)
    return engine


def _start_launched(loaded: LoadedConfig, place: Place) -> Engine:
    """Build the engine of a rank that torchrun started."""
    parallel = loaded.config.parallel
    group = join_launched(place, parallel.start_timeout)
    planned = make_plan(loaded, place=place)
    links = link = None
    if place.rank == 0:
        links = Links(group, parallel.timeout, os.environ["MASTER_ADDR"])
        links.accept(lambda: None, parallel.start_timeout)
        links.on_failure(partial(_end_process_later, 5.0))
    else:
        link = Link(group, partial(_end_process_later, 5.0))
    return _built(planned, group, links, link, logged=False)


def _built(planned: Planned, group: RankGroup, links: Links | None, link: Link | None, *, logged: bool) -> Engine:
    if planned.on_host:
        torch.set_num_threads(max(1, torch.get_num_threads() // planned.place.layout.size))
    try:
        engine = build_engine(planned.loaded, group, RankedEngine, planned)
    except BaseException as error:
        if link is not None:
            link.failed(error)
        elif links is not None and isinstance(error, RuntimeError) and links.failed.wait(2.0):
            raise links.error() from error
        raise
    assert isinstance(engine, RankedEngine)
    if links is not None:
        links.building = False
        links.on_failure(engine.end_collectives)
    engine.connect(group, links, link, logged=logged)
    return engine


def _joined(place: Place, store: Store, launched: Launched, timeout: float) -> RankGroup:
    try:
        return join_store(place, store, timeout)
    except RankError as error:
        if (ended := launched.ended()) is not None:
            raise RankError(ended, fix="read its error above") from error
        raise


def _end(launched: Launched, links: Links | None, group: RankGroup | None, patience: float = 0.0) -> None:
    """End the other ranks."""
    if links is not None:
        links.close()
    launched.end(patience)
    if group is not None:
        group.close()


def _end_process_later(seconds: float) -> None:
    """End this process, which torchrun started, if its main thread does not leave a collective by itself."""
    import threading
    import time

    def wait() -> None:
        time.sleep(seconds)
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
