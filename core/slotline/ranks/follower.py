"""Program of a rank that rank 0 started: build the engine, and do what rank 0 is asked to do."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slotline.planner.plan import make_plan
from slotline.planner.ranks import layout_of
from slotline.ranks.group import join_store, launched_place
from slotline.ranks.launch import CONFIG
from slotline.ranks.links import Link
from slotline.ranks.ranked_engine import RankedEngine
from slotline.ranks.start import _built


def main() -> int:
    """Follow rank 0 until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    logging.getLogger("slotline").setLevel(logging.ERROR)  # rank 0 has said it
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=600))
    loaded = pickle.loads(bytes.fromhex(store.get(CONFIG).decode()))
    place = launched_place(layout_of(loaded))
    assert place is not None
    group = join_store(place, store, loaded.config.parallel.start_timeout)
    link = Link(group, partial(os._exit, 1))
    try:
        planned = make_plan(loaded, place=place)
    except BaseException as error:
        link.failed(error)
        raise
    engine = _built(planned, group, None, link, logged=False)
    assert isinstance(engine, RankedEngine)
    while True:
        try:
            message = link.log.recv_bytes()
        except (EOFError, OSError):
            return 0
        try:
            engine.perform(message)
        except Exception:  # told to rank 0, which goes on if it raised the same
            continue


if __name__ == "__main__":
    sys.exit(main())
