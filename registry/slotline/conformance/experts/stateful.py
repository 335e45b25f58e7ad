"""L3 of experts plugins: random sequences of mixtures."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, Run, check
from slotline.testing.environments.experts import MAX_TOKENS, ExpertsWorld, once

STEPS = 60


@check(Kind.EXPERTS, "experts.history.mixed", Level.STATEFUL, cases=once, explores=True, cost=0.5, profile="mixed")
def history_mixed(run: Run) -> None:
    """Mixtures of any number of tokens and any number of experts for each are all right."""
    world, rng = ExpertsWorld(run), run.rng
    for step in range(STEPS):
        tokens, k = rng.choice((1, 1, 2, rng.randint(1, MAX_TOKENS))), rng.randint(1, world.experts)
        given = world.inputs(tokens, k)
        if rng.random() < 0.2:
            given[1][rng.randrange(tokens), rng.randrange(k)] = world.experts
        world.check(given, f"step {step}: {tokens} tokens, {k} experts each")
