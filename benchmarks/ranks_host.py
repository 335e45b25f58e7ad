"""Host cost of a decode step of several ranks beside one process: what telling the others and watching them takes.

    python benchmarks/ranks_host.py [--requests 256] [--steps 20] [--ranks 2] [--rounds 75] [--read] [--json FILE]

The engines are those of host_step.py, with no arithmetic and no collectives. The other ranks are real processes that
rank 0 tells what it is asked to do, as with `tensor = 2`. Both engines are timed in turns. The time of rank 0's thread
on the CPU is shown as well, since it does not count what other programs of the machine take. With `--read` the other
ranks only read what they are told: where processes share cores and caches, this tells rank 0's own cost from theirs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
from command_line import positive
from host_step import build, measure, tokens_given
from result_file import write_result
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slotline.core.engine.engine import Engine
from slotline.ranks.group import RankGroup
from slotline.ranks.links import Link, Links
from slotline.ranks.ranked_engine import RankedEngine
from slotline.registry.ranks import Place, RankLayout

SHORT = "--requests 2 --steps 5 --rounds 1"


def follow(port: int, rank: int, ranks: int, requests: int, steps: int, reads: bool) -> None:
    """Be another rank until rank 0 ends, or only read what it is told."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    link = Link(store, rank, partial(os._exit, 0))
    with suppress(EOFError, OSError):
        while reads:
            link.log.recv_bytes()
    if reads:
        return
    ranked(RankGroup(place(rank, ranks), store, owner=False), None, link, requests, steps).follow()


def place(rank: int, ranks: int) -> Place:
    """The place of a rank."""
    return Place(rank=rank, local_rank=rank, layout=RankLayout(tensor=ranks))


def ranked(group: RankGroup, links: Links | None, link: Link | None, requests: int, steps: int) -> RankedEngine:
    """The engine of a rank."""
    engine: Any = build(requests, steps, RankedEngine)
    engine.connect(group, links, link, logged=True)
    return engine  # type: ignore[no-any-return]


def rounds_of(engine: Engine, steps: int, rounds: int, other: Engine) -> tuple[list[float], ...]:
    """Seconds of the steps of two engines in turns, by the clock and by the CPU's time of this thread."""
    found: tuple[list[float], ...] = ([], [], [], [])
    for _ in range(rounds):
        for index, one in enumerate((engine, other)):
            for _ in range(steps):
                start, begun = perf_counter(), thread_time()
                one.step()
                found[2 * index + 1].append(thread_time() - begun)
                found[2 * index].append(perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=positive, default=256)
    parser.add_argument("--steps", type=positive, default=20, help="of a round")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=75)
    parser.add_argument("--read", action="store_true", help="the other ranks only read what they are told")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    total = given.steps * given.rounds
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    links = Links(store, place(0, given.ranks), 60.0, 60.0)
    processes = [
        multiprocessing.get_context("spawn").Process(
            target=follow, args=(store.port, rank, given.ranks, given.requests, total, given.read), daemon=True
        )
        for rank in range(1, given.ranks)
    ]
    for process in processes:
        process.start()
    links.accept(lambda: None)
    engine = ranked(RankGroup(place(0, given.ranks), store, owner=False), links, None, given.requests, total)
    alone = build(given.requests, total)
    for one in (engine, alone):
        measure(one, given.requests, 1, detokenize=False, tokens=tokens_given(total))
        one.profiler.disable()
    found = rounds_of(alone, given.steps, given.rounds, engine)
    links.close()
    for process in processes:
        process.join(10)
    rows = [
        [name, *(f"{1e3 * value:.3f}" for value in (before, after, after - before))]
        for name, one, two in (("by the clock", found[0], found[2]), ("CPU time of the thread", found[1], found[3]))
        for before, after in [(statistics.median(one), statistics.median(two))]
    ]
    columns = [f"{given.requests} decoding requests, median", "one process, ms", f"{given.ranks} ranks, ms", "more, ms"]
    for row in (columns, *rows):
        print("  ".join(f"{cell:>32}" for cell in row))
    if given.json:
        write_result(given.json, "ranks_host", columns, rows, note=f"{given.rounds} rounds of {given.steps} steps.")


if __name__ == "__main__":
    main()
