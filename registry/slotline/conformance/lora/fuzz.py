"""Random histories of loading, unloading, refusals and batches, against a dictionary."""

from __future__ import annotations

from random import Random

from slotline.conformance.lora.numerics import once, ranks
from slotline.registry.descriptor import Kind
from slotline.registry.errors import CapacityError, RequestError
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.lora import LoraWorld

STEPS = 40


@check(
    Kind.LORA,
    "lora.fuzz.slots",
    Level.STATEFUL,
    cases=lambda subject: [{"history": n} for _ in once(subject) for n in range(12 if subject.exhaustive else 3)],
    explores=True,
    cost=1.0,
    profile="mixed",
)
def fuzz_slots(run: Run) -> None:
    """After any history each token gets the share of the adapter that its slot holds now."""
    rng, story = run.rng, []
    with LoraWorld(run, max_tokens=16) as world:
        for _ in range(STEPS):
            story.append(_change(world, rng, run))
            modules = rng.sample(list(world.modules), 2) if len(world.modules) > 1 else list(world.modules)
            names = world.names(rng.choice((0, 1, 3, 16)))
            try:
                world.check(names, f"batch {names}", modules)
            except Failed as failure:
                raise Failed(f"{failure}; what went before: {'; '.join(story[-10:])}") from None


def _change(world: LoraWorld, rng: Random, run: Run) -> str:
    """Load, unload, or try a faulty folder, and return a description."""
    name = f"n{rng.randrange(world.max_adapters + 2)}"
    if name in world.loaded:
        if rng.random() < 0.3:
            return "no change"
        world.unload(name)
        return f"unload {name}"
    modules = [module for module in world.modules if rng.random() < 0.7] or None
    adapter = world.adapter(rng.choice(ranks(run.subject)), alpha=rng.choice((2, 12.0)), modules=modules)
    if len(world.loaded) == world.max_adapters:
        return _refused(world, name, world.write(adapter), "no slot is free")
    if rng.random() < 0.2:
        return _refused(world, name, world.write(world.adapter(world.max_rank + 1)), "the rank is too high")
    slot = world.load(name, adapter)
    return f"load {name} with rank {adapter.rank} on {len(adapter.weights)} modules into slot {slot}"


def _refused(world: LoraWorld, name: str, path: object, why: str) -> str:
    try:
        world.lora.load(name, str(path))
    except (RequestError, CapacityError):
        return f"load {name} refused: {why}"
    raise Failed(f"load({name!r}) went through, though {why}")
