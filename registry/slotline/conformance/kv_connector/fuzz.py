"""L3 of KV connectors: long random histories."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.kv_connector import NUM_BLOCKS, Pool

STEPS = 120


@check(Kind.KV_CONNECTOR, "kv_connector.fuzz.traffic", Level.STATEFUL, explores=True, cost=1.0, profile="mixed")
def fuzz_traffic(run: Run) -> None:
    """Saves and loads in any order, many at once, with resets between: each block that is held comes back."""
    pool, rng, loaded = Pool(run), run.rng, 0
    for number in range(STEPS):
        if rng.random() < 0.03:
            pool.connector.reset()
            pool.known.clear()
        blocks = rng.sample(range(1, NUM_BLOCKS), 40)
        names = rng.sample([f"{i}" for i in range(50)], 20)
        saves = [pool.block(rng.randrange(2), names[i], blocks[i]) for i in range(rng.randrange(10))]
        loads = []
        for name, block in zip(names[10:], blocks[10:], strict=False):
            group = rng.randrange(2)
            if pool.held(group, [name])[0]:
                loads.append(pool.wanted(group, name, block))
        if loads and saves and not pool.lasting and rng.random() < 0.5:  # into a block that is saved
            one = loads[0]
            if saves[0].group == one.group:
                loads[0] = one._replace(block=saves[0].block)
        if failed := pool.step(saves, loads):
            raise Failed(f"step {number}: the loads into {sorted(failed)} failed; `held` had just said yes")
        loaded += len(loads)
    run.measured["loaded"] = loaded
