"""L3 of weight formats: modules are read in any order, again and again."""

from __future__ import annotations

from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, NotApplicable, Run, check
from slotline.testing.environments.weight_format import FormatWorld, MemoryReader, by_example, context_of

READS = 40


@check(Kind.WEIGHT_FORMAT, "weight_format.history.reads", Level.STATEFUL, cases=by_example, explores=True, cost=0.2)
def history_reads(run: Run) -> None:
    """Modules that are read in a random order, several times, are each time their own."""
    world, rng = FormatWorld(run), run.rng
    weights = world.weights()
    built = world.build(MemoryReader(world.tensors(weights)))
    for step in range(READS):
        name = rng.choice(list(weights))
        world.check(built, name, weights[name], f"read {step}: ")


@check(Kind.WEIGHT_FORMAT, "weight_format.history.online", Level.STATEFUL, needs={"online": True}, cost=0.1)
def history_online(run: Run) -> None:
    """Weights that are quantized between others come out as they do alone."""
    import torch

    from slotline.testing.check import Failed

    built = run.subject.build(context_of(run.subject, None, MemoryReader({})))
    alone = run.subject.build(context_of(run.subject, None, MemoryReader({})))
    generator, name = torch.Generator().manual_seed(run.seed), "model.layers.0.mlp.up_proj"
    if built.scheme_of(name, "linear") is None:
        raise NotApplicable(f"{name} stays plain")
    for step in range(READS):
        weight = torch.randn(run.rng.randint(1, 40), 64, generator=generator)
        one, other = built.quantize(name, "linear", weight.clone()), alone.quantize(name, "linear", weight)
        if not torch.equal(one.dequantize(), other.dequantize()):
            raise Failed(f"weight {step} came out differently than in another engine")
        alone = run.subject.build(context_of(run.subject, None, MemoryReader({})))
