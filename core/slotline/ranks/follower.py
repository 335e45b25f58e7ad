"""Program of a rank that rank 0 started: build the engine, and do what rank 0 is asked to do."""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slotline.planner.plan import make_plan
from slotline.planner.ranks import layout_of
from slotline.ranks.child import be_child_of
from slotline.ranks.group import join_store, launched_place
from slotline.ranks.launch import CONFIG
from slotline.ranks.links import Link
from slotline.ranks.logs import log_as
from slotline.ranks.start import build_rank


def main() -> int:
    """Follow rank 0 until it ends. Errors are told to rank 0."""
    log_as("rank " + os.environ["RANK"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=600))
    link = Link(store, int(os.environ["RANK"]), partial(os._exit, 1))
    try:
        loaded = pickle.loads(bytes.fromhex(store.get(CONFIG).decode()))
        place = launched_place(layout_of(loaded))
        assert place is not None
        planned = make_plan(loaded, place=place)
        link.planned()
        link.group = group = join_store(place, store, loaded.config.parallel.start_timeout)
        engine = build_rank(planned, group, None, link, logged=True)
        engine.follow()
    except BaseException as error:
        link.failed(error)
        return 1
    return 0


if __name__ == "__main__":
    be_child_of(int(sys.argv[1]))
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the process has nothing to save, and libraries may wait for their threads
