"""L1 of KV connectors: saved blocks come back."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.kv_connector import NUM_BLOCKS, NUM_STATES, PARTS, STATE, Pool

COUNT = 5


@check(Kind.KV_CONNECTOR, "kv_connector.blocks.return", Level.NUMERICS, cost=0.02)
def blocks_return(run: Run) -> None:
    """Blocks of two groups, saved together, come back bit for bit in other blocks of the pool."""
    pool = Pool(run)
    saves = [pool.block(group, f"{group}.{i}", 3 + 2 * i + group) for i in range(COUNT) for group in (0, 1)]
    pool.step(saves, ())
    there = [(group, i) for i in range(COUNT) for group in (0, 1) if pool.held(group, [f"{group}.{i}"])[0]]
    if not there:
        raise Failed(f"nothing is held of {len(saves)} blocks that were saved")
    loads = [pool.wanted(group, f"{group}.{i}", 40 + 2 * i + group) for group, i in there]
    if failed := pool.step((), loads):
        raise Failed(f"blocks {sorted(failed)} failed, and were held")


@check(Kind.KV_CONNECTOR, "kv_connector.states.return", Level.NUMERICS, cost=0.02)
def states_return(run: Run) -> None:
    """States, which are larger than blocks and numbered behind them, come back bit for bit beside blocks."""
    pool = Pool(run)
    if len(pool.groups) <= STATE:
        raise NotApplicable("no group of states: states is not declared")
    half = NUM_STATES // 2
    saves = [pool.block(STATE, f"s{i}", NUM_BLOCKS + i) for i in range(half)]
    saves += [pool.block(0, f"s{i}", 3 + i) for i in range(half)]  # of the same prefixes
    pool.step(saves, ())
    there = [i for i in range(half) if pool.held(STATE, [f"s{i}"])[0]]
    if not there:
        raise Failed(f"nothing is held of {half} states that were saved")
    loads = [pool.wanted(STATE, f"s{i}", NUM_BLOCKS + half + i) for i in there]
    loads += [pool.wanted(0, f"s{i}", 40 + i) for i in range(half) if pool.held(0, [f"s{i}"])[0]]
    if failed := pool.step((), loads):
        raise Failed(f"blocks {sorted(failed)} failed, and were held")


@check(Kind.KV_CONNECTOR, "kv_connector.layers.return", Level.NUMERICS, cost=0.02)
def layers_return(run: Run) -> None:
    """Blocks that a pass has filled layer by layer come back bit for bit, also if an earlier pass has failed.

    Before they are saved they are not held, since their step may fail.
    """
    pool = Pool(run)
    if not run.subject.capabilities.layers.support:
        raise NotApplicable("layers is not declared")
    blocks = [pool.wanted(group, f"{group}.{i}", 3 + 2 * i + group) for i in range(COUNT) for group in (0, 1)]
    pool.forward(blocks[:COUNT], good=False)
    pool.forward(blocks)
    if early := [one.block_hash for one in blocks if pool.held(one.group, [one.block_hash.decode()])[0]]:
        raise Failed(f"{early} are held, and were not saved: their step may fail")
    pool.forward([pool.wanted(0, "next", 70)])  # while the results of the one before are awaited
    pool.step(blocks, ())
    there = [one for one in blocks if pool.held(one.group, [one.block_hash.decode()])[0]]
    if not there:
        raise Failed(f"nothing is held of {len(blocks)} blocks that were filled layer by layer, and saved")
    loads = [one._replace(block=one.block + 40) for one in there]
    if failed := pool.step((), loads):
        raise Failed(f"blocks {sorted(failed)} failed, and were held")


@check(Kind.KV_CONNECTOR, "kv_connector.held.each", Level.NUMERICS, cost=0.02)
def held_each(run: Run) -> None:
    """Each hash has its own answer, in its place, and only for the group that it was saved in."""
    pool = Pool(run)
    if any(pool.held(0, ["a", "b"])) or pool.held(1, []):
        raise Failed("something is held before anything was saved")
    pool.step([pool.block(0, "b", 7), pool.block(1, "c", 8)], ())
    found = [pool.held(0, ["a", "b", "c"]), pool.held(1, ["a", "b", "c"])]
    if found[0][0] or found[0][2] or found[1][0] or found[1][1]:
        raise Failed(f"b was saved in group 0 and c in group 1; held says of a, b and c {found}")


@check(Kind.KV_CONNECTOR, "kv_connector.parts.apart", Level.NUMERICS, cost=0.02)
def parts_apart(run: Run) -> None:
    """Blocks that a rank saved are not held for another rank, which has other heads of them."""
    first = Pool(run, PARTS[0])
    second = Pool(run, PARTS[1], beside=first)
    saves = [first.block(group, f"apart.{group}", 5 + group) for group in (0, 1)]
    first.step(saves, ())
    if wrong := [group for group in (0, 1) if second.held(group, [f"apart.{group}"])[0]]:
        raise Failed(f"blocks of groups {wrong} were saved as {PARTS[0]!r} and are held as {PARTS[1]!r}")
    second.step([second.block(group, f"apart.{group}", 9 + group) for group in (0, 1)], ())
    for number, pool in enumerate((first, second)):
        there = [group for group in (0, 1) if pool.held(group, [f"apart.{group}"])[0]]
        if failed := pool.step((), [pool.wanted(group, f"apart.{group}", 30 + group) for group in there]):
            raise Failed(f"blocks {sorted(failed)} of {PARTS[number]!r} failed, and were held")
