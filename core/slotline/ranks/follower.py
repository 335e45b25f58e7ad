"""Program of a rank that rank 0 started: build the engine, and do what rank 0 is asked to do."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from slotline.planner.plan import make_plan
from slotline.ranks.child import be_child_of
from slotline.ranks.launch import CONFIG
from slotline.ranks.links import Link
from slotline.ranks.logs import log_as
from slotline.ranks.start import PlainRanks, RankForm


def main(form_of: Callable[[Store], RankForm] = lambda store: PlainRanks()) -> int:
    """Follow rank 0 until it ends. Errors are told to rank 0.

    Args:
        form_of: returns how the ranks find each other. Given rank 0's store.
    """
    log_as("rank " + os.environ["RANK"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=600))
    link = Link(store, int(os.environ["RANK"]), partial(os._exit, 1))
    try:
        loaded = pickle.loads(bytes.fromhex(store.get(CONFIG).decode()))
        form = form_of(store)
        planned = make_plan(loaded, place=form.place(loaded))
        link.planned()
        link.group = group = form.join(planned.place, store, loaded.config.parallel.start_timeout)
        engine = form.build(planned, group, None, link)
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
