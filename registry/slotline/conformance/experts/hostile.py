"""L2 of experts plugins: lopsided routing, experts that are none, strange neighbours, several mixtures."""

from __future__ import annotations

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.experts import ExpertsWorld, once, seen


@check(Kind.EXPERTS, "experts.route.each", Level.HOSTILE, cases=once, cost=0.02)
def route_each(run: Run) -> None:
    """Each expert alone has its own weights, the first and the last included."""
    world = ExpertsWorld(run, bias=bool(run.subject.capabilities.bias.support))
    world.check(seen(world), "one token for each expert")


@check(Kind.EXPERTS, "experts.route.same", Level.HOSTILE, cases=once, cost=0.03)
def route_same(run: Run) -> None:
    """All tokens may choose one expert, and a token all experts."""
    world = ExpertsWorld(run)
    x, ids, shares = world.inputs(40, 1)
    world.check((x, torch.full_like(ids, world.experts - 1), shares), "all choose the last expert")
    world.check(world.inputs(6, world.experts), "each chooses all experts")


@check(Kind.EXPERTS, "experts.route.none", Level.HOSTILE, cases=once, cost=0.03)
def route_none(run: Run) -> None:
    """The number of experts stands for none: it adds nothing, whatever its weight is."""
    world = ExpertsWorld(run)
    x, ids, shares = world.inputs(9)
    ids[::2, 1] = world.experts
    ids[4] = world.experts
    shares[4] = 3.0
    world.check((x, ids, shares), "some of the experts are none")


@check(Kind.EXPERTS, "experts.route.weights", Level.HOSTILE, cases=once, cost=0.02)
def route_weights(run: Run) -> None:
    """Weights of the mixture need not sum to one: they may be zero, negative and large."""
    world = ExpertsWorld(run)
    x, ids, shares = world.inputs(5)
    shares[0], shares[1], shares[2] = 0.0, -1.0, 8.0
    world.check((x, ids, shares), "weights of 0, -1 and 8")


@check(Kind.EXPERTS, "experts.apply.tokens", Level.HOSTILE, cases=once, cost=0.1)
def apply_tokens(run: Run) -> None:
    """Every number of tokens up to 36 gives the same mixture."""
    world = ExpertsWorld(run)
    for tokens in range(1, 37):
        world.check(world.inputs(tokens), f"{tokens} tokens")


@check(Kind.EXPERTS, "experts.apply.neighbours", Level.HOSTILE, cases=once, cost=0.02)
def apply_neighbours(run: Run) -> None:
    """NaN of one token leaves the others' outputs as they are, those with the same experts included."""
    world = ExpertsWorld(run)
    x, ids, shares = world.inputs(8)
    ids[:] = ids[:1]
    strange = x.clone()
    strange[3] = float("nan")
    out = world.applied(strange, ids, shares)
    rest = [token for token in range(8) if token != 3]
    world.compare(out[rest], (x[rest], ids[rest], shares[rest]), "beside a token of NaN")


@check(Kind.EXPERTS, "experts.pack.several", Level.HOSTILE, cases=once, cost=0.03)
def pack_several(run: Run) -> None:
    """One instance serves several layers."""
    world = ExpertsWorld(run)
    layers = [(world.weights, world.packed)]
    world.weights, world.biases = world.mixture()
    world.packed = world.pack()
    layers.append((world.weights, world.packed))
    for number in (0, 1, 0):
        world.weights, world.packed = layers[number]
        world.check(world.inputs(4), f"layer {number} of 2")


@check(Kind.EXPERTS, "experts.apply.invariant", Level.HOSTILE, needs={"batch_invariant": True}, cases=once, cost=0.03)
def apply_invariant(run: Run) -> None:
    """A token's outputs are bitwise the same alone and in any batch, and right."""
    world = ExpertsWorld(run, batch_invariant=True)
    given = world.inputs(33)
    alone = torch.cat([world.applied(*(part[i : i + 1].clone() for part in given)) for i in range(33)])
    world.compare(alone, given, "each token by itself")
    for start, stop in ((0, 2), (0, 8), (3, 20), (0, 33)):
        if not torch.equal(world.applied(*(part[start:stop].clone() for part in given)), alone[start:stop]):
            raise Failed(f"{stop - start} tokens together have other bits than each by itself")
