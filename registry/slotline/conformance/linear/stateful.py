"""L3 of linear plugins: random sequences of products with several weights."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, Run, check
from slotline.testing.environments.linear import MAX_TOKENS, LinearWorld, by_first_dtype

STEPS = 60


@check(
    Kind.LINEAR, "linear.history.mixed", Level.STATEFUL, cases=by_first_dtype, explores=True, cost=0.3, profile="mixed"
)
def history_mixed(run: Run) -> None:
    """Products of any number of tokens with any of several weights, new ones packed between, are all right."""
    world, rng = LinearWorld(run, 48, 64), run.rng
    weights = [world.weight() for _ in range(3)]
    packed = [world.pack(weight) for weight in weights]
    for step in range(STEPS):
        index = rng.randrange(3)
        if rng.random() < 0.1:
            weights[index] = world.weight()
            packed[index] = world.pack(weights[index])
        tokens = rng.choice((1, 1, 2, rng.randint(1, MAX_TOKENS)))
        world.check(world.inputs(tokens), packed[index], weights[index], f"step {step}, {tokens} tokens")
