"""Checks of connectors that are called at each layer of a forward pass."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.kv_connector import Pool

NAMES = [f"{group}.{i}" for i in range(4) for group in (0, 1)]


@check(
    Kind.KV_CONNECTOR,
    "kv_connector.layers.save",
    Level.NUMERICS,
    cases=lambda _: ({"calls": calls} for calls in ("at layers", "behind the pass")),
    cost=0.02,
)
def layers_save(run: Run) -> None:
    """Blocks of which each layer is saved when it is written come back bit for bit, also behind a captured pass."""
    pool = _pool(run)
    if run["calls"] == "behind the pass":
        if not run.subject.capabilities.late_layers.support:
            raise NotApplicable("calls come where layers attend: late_layers is not declared")
        pool.late = True
    fills = [pool.filling(int(name[0]), name, 3 + i) for i, name in enumerate(NAMES)]
    pool.step((), (), fills[:4])
    pool.step(fills[:4], (), fills[4:])
    pool.step(fills[4:], ())
    _back(pool, NAMES, 40)


@check(Kind.KV_CONNECTOR, "kv_connector.layers.broken", Level.HOSTILE, cost=0.02)
def layers_broken(run: Run) -> None:
    """What the first layer wrote in a pass that broke is not part of the blocks that a later pass fills."""
    pool = _pool(run)
    fills = [pool.filling(int(name[0]), name, 3 + i) for i, name in enumerate(NAMES)]
    right = dict(pool.known)
    for one in fills:  # a pass whose keys are wrong, and which ends behind its first layer
        pool.known[one.group, one.block_hash] = right[one.group, one.block_hash] ^ 0x55
    pool.connector.start((), ())
    pool.layer_calls.filling(fills)
    pool.connector.wait()
    pool.attend((), fills, 1)
    pool.known = right
    pool.step((), ())
    fills = [pool.filling(one.group, one.block_hash.decode(), one.block + 20) for one in fills]
    pool.step((), (), fills)
    pool.step(fills, ())
    _back(pool, NAMES, 50)


def _pool(run: Run) -> Pool:
    pool = Pool(run)
    if not pool.layered:
        raise NotApplicable("it is not called while passes run: layers is not declared")
    return pool


def _back(pool: Pool, names: list[str], first: int) -> None:
    """Load blocks.

    Raises:
        Failed: if none is held, or one that is held does not come back.
    """
    there = [(i, name) for i, name in enumerate(names) if pool.held(int(name[0]), [name])[0]]
    if not there:
        raise Failed(f"nothing is held of {len(names)} blocks that were saved")
    if failed := pool.step((), [pool.wanted(int(name[0]), name, first + i) for i, name in there]):
        raise Failed(f"blocks {sorted(failed)} failed, and were held")
