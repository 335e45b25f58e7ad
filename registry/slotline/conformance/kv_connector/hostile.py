"""L2 of KV connectors: overlapping copies, little room, loads of missing blocks."""

from __future__ import annotations

from typing import cast

import torch

from slotline.registry.contracts import AsyncKVConnector, LastingKVConnector
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.kv_connector import NUM_BLOCKS, Pool

ROOM = 24
"""KiB of a store that has room for less than 64 blocks."""


@check(Kind.KV_CONNECTOR, "kv_connector.blocks.both", Level.HOSTILE, cost=0.02)
def blocks_both(run: Run) -> None:
    """A block of the pool that is saved and loaded at once is read before it is written."""
    pool = Pool(run)
    if pool.lasting:
        raise NotApplicable("a block that is being saved is not loaded into: saves in the step are not declared")
    pool.step([pool.block(0, "old", 5)], ())
    if not pool.held(0, ["old"])[0]:
        return  # it keeps less than one block, which is no fault of order
    save, load = pool.block(0, "new", 9), pool.wanted(0, "old", 9)
    pool.connector.start([save], [load])
    if pool.layered:
        pool.layer_calls.filling([])
    pool.connector.wait()
    pool.ended([load])
    if pool.layered:
        pool.attend([load], [])
    if pool.held(0, ["new"])[0] and pool.step((), [pool.wanted(0, "new", 11)]):
        raise Failed("what was saved beside a load failed to load, and was held")


@check(Kind.KV_CONNECTOR, "kv_connector.loads.room", Level.HOSTILE, cost=0.05)
def loads_room(run: Run) -> None:
    """Loads that `held` confirmed arrive, for any number of saves in the same step, and no more than has room is held.

    The store is given room for half of the blocks, if it says by which option.
    """
    pool = Pool(run, room=ROOM)
    pool.step([pool.block(0, f"first {i}", 1 + i) for i in range(4)], ())
    there = [i for i in range(4) if pool.held(0, [f"first {i}"])[0]]
    saves = [pool.block(0, f"more {i}", 10 + i) for i in range(60)]
    if failed := pool.step(saves, [pool.wanted(0, f"first {i}", NUM_BLOCKS - 1 - i) for i in there]):
        raise Failed(f"the loads into blocks {sorted(failed)} failed beside 60 saves; `held` had said yes")
    names = [*(f"first {i}" for i in range(4)), *(f"more {i}" for i in range(60))]
    here, size = [i for i, held in enumerate(pool.held(0, names)) if held], pool.groups[0].block_bytes
    if (option := run.subject.capabilities.room) and len(here) * size > ROOM * 1024:
        raise Failed(f"{len(here)} blocks of {size} bytes are held, and the option {option} is set to {ROOM}KiB")
    if failed := pool.step((), [pool.wanted(0, names[i], 5 + n) for n, i in enumerate(here)]):
        raise Failed(f"the loads into blocks {sorted(failed)} failed, and were held when the store was full")


@check(Kind.KV_CONNECTOR, "kv_connector.loads.absent", Level.HOSTILE, cost=0.02)
def loads_absent(run: Run) -> None:
    """A load of a missing block is reported as failed, once, or raises, and a good load next to it arrives."""
    pool = Pool(run)
    pool.step([pool.block(0, "here", 5)], ())
    here = [pool.wanted(0, "here", 20)] if pool.held(0, ["here"])[0] else []
    pool.known[0, b"absent"] = pool.bytes[0][60].clone()
    try:
        failed = pool.step((), [*here, pool.wanted(0, "absent", 21)])
    except Failed:
        raise
    except Exception:  # which the core takes for a failure of all
        return
    if failed != {21}:
        raise Failed(f"the load into block 21 must fail alone, and {sorted(failed)} are said to have failed")
    if again := pool.step((), ()):
        raise Failed(f"blocks {sorted(again)} are said to have failed once more")


@check(Kind.KV_CONNECTOR, "kv_connector.saves.again", Level.HOSTILE, cost=0.02)
def saves_again(run: Run) -> None:
    """A held block can be saved again from another block, by itself and with others, and comes back."""
    pool = Pool(run)
    for block in (5, 6, 7):
        pool.step([pool.block(0, "same", block), pool.block(0, f"other {block}", block + 20)], ())
    names = ["same", "other 5", "other 6", "other 7"]
    there = [name for name, held in zip(names, pool.held(0, names), strict=True) if held]
    if failed := pool.step((), [pool.wanted(0, name, 40 + i) for i, name in enumerate(there)]):
        raise Failed(f"blocks {sorted(failed)} failed, and were held")


@check(Kind.KV_CONNECTOR, "kv_connector.reset.forgets", Level.HOSTILE, cost=0.02)
def reset_forgets(run: Run) -> None:
    """After a reset nothing is held, and what is saved then under the same hashes is what counts."""
    pool = Pool(run)
    names = [f"{i}" for i in range(4)]
    pool.step([pool.block(0, name, 3 + i) for i, name in enumerate(names)], ())
    pool.connector.reset()
    if any(found := pool.held(0, names)):
        raise Failed(f"after a reset held still says {found}")
    pool.known.clear()  # other weights, other keys
    pool.step([pool.block(0, name, 3 + i) for i, name in enumerate(names)], ())
    there = [i for i, held in enumerate(pool.held(0, names)) if held]
    if not there:
        raise Failed("nothing is held of what was saved after a reset")
    if failed := pool.step((), [pool.wanted(0, names[i], 40 + i) for i in there]):
        raise Failed(f"blocks {sorted(failed)} failed, and were held")


@check(Kind.KV_CONNECTOR, "kv_connector.loads.finish", Level.HOSTILE, cost=0.02)
def loads_finish(run: Run) -> None:
    """After `finish` no load of an asynchronous connector is under way, and each is said once to have ended."""
    pool = Pool(run)
    if not pool.asynchronous:
        raise NotApplicable("loads end in the step that they are started for: asynchronous is not declared")
    connector = cast("AsyncKVConnector", pool.connector)
    pool.step([pool.block(0, f"{i}", 3 + i) for i in range(4)], ())
    loads = [pool.wanted(0, f"{i}", 40 + i) for i in range(4) if pool.held(0, [f"{i}"])[0]]
    connector.start((), loads)
    connector.finish()
    before = pool.bytes[0].clone()
    ended = set(connector.arrived()) | set(connector.failed())
    if missing := {one.block for one in loads} - ended:
        raise Failed(f"the loads into {sorted(missing)} were not finished")
    if not torch.equal(before, pool.bytes[0]):
        raise Failed("blocks were written after `finish`")
    if again := set(connector.arrived()) | set(connector.failed()):
        raise Failed(f"blocks {sorted(again)} are said to have ended once more")


@check(Kind.KV_CONNECTOR, "kv_connector.saves.finish", Level.HOSTILE, cost=0.02)
def saves_finish(run: Run) -> None:
    """After `finish` no save is under way: each is said once to have ended, and its block may be overwritten."""
    pool = Pool(run)
    if not pool.lasting:
        raise NotApplicable("saves end in the step that they are started for: lasting_saves is not declared")
    connector = cast("LastingKVConnector", pool.connector)
    saves = [pool.block(0, f"{i}", 3 + i) for i in range(4)]
    connector.start(saves, ())
    connector.finish()
    if missing := {one.block for one in saves} - set(connector.saved()):
        raise Failed(f"the saves of {sorted(missing)} were not finished")
    pool.bytes[0].zero_()
    if again := set(connector.saved()):
        raise Failed(f"blocks {sorted(again)} are said to be saved once more")
    loads = [pool.wanted(0, f"{i}", 40 + i) for i in range(4) if pool.held(0, [f"{i}"])[0]]
    if failed := pool.step((), loads):
        raise Failed(f"blocks {sorted(failed)} failed, and were held")


@check(Kind.KV_CONNECTOR, "kv_connector.blocks.third", Level.HOSTILE, cost=0.05)
def blocks_third(run: Run) -> None:
    """The third save, load and reset of a name, and those after it, are as good as the first."""
    pool = Pool(run)
    for number in range(1, 5):
        pool.step([pool.block(0, "same", 4 + number), pool.block(0, f"other {number}", 20)], ())
        for load in range(1, 5):
            names = [name for name in ("same", f"other {number}") if pool.held(0, [name])[0]]
            if failed := pool.step((), [pool.wanted(0, name, 30 + i) for i, name in enumerate(names)]):
                raise Failed(f"blocks {sorted(failed)} failed in load {load} of save {number}, and were held")
    for number in range(1, 5):
        pool.connector.reset()
        if any(pool.held(0, ["same", "other 1"])):
            raise Failed(f"after reset {number} something is held")
        pool.known.clear()
        pool.step([pool.block(0, "same", 5)], ())
        if pool.held(0, ["same"])[0] and pool.step((), [pool.wanted(0, "same", 31)]):
            raise Failed(f"what was saved after reset {number} failed to load, and was held")
