"""L1 of experts plugins: mixtures of each declared scheme, dtype and form against a float64 oracle."""

from __future__ import annotations

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.experts import ExpertsWorld, activations_of, by_scheme, once, schemes_of

BYTES_OFF = 0.125
"""Share by which `num_bytes` may differ from the packed tensors."""


@check(Kind.EXPERTS, "experts.apply.schemes", Level.NUMERICS, cases=by_scheme, cost=0.05, profile="mixed")
def apply_schemes(run: Run) -> None:
    """The mixture of dequantized experts, for one token, a few and many."""
    world = ExpertsWorld(run)
    for tokens in (1, 3, 24):
        world.check(world.inputs(tokens), f"{tokens} tokens")


@check(
    Kind.EXPERTS,
    "experts.apply.forms",
    Level.NUMERICS,
    cost=0.05,
    cases=lambda subject: [
        {**case, "activation": name, "interleaved": interleaved}
        for case in once(subject)
        for name in activations_of(subject)
        for interleaved in (False, True)
    ],
)
def apply_forms(run: Run) -> None:
    """Each declared activation, with gates in front of ups and with both alternating."""
    world = ExpertsWorld(run, activation=run["activation"], interleaved=run["interleaved"])
    given = world.inputs(9)
    given[0].mul_(4)  # beyond the limit of gates, too
    world.check(given, run["activation"])


@check(Kind.EXPERTS, "experts.apply.bias", Level.NUMERICS, needs={"bias": True}, cases=once, cost=0.03)
def apply_bias(run: Run) -> None:
    """Each expert adds its own biases, the second one before its weight in the mixture."""
    world = ExpertsWorld(run, bias=True)
    for tokens in (1, 12):
        world.check(world.inputs(tokens), f"{tokens} tokens with biases")


@check(
    Kind.EXPERTS,
    "experts.pack.joined",
    Level.NUMERICS,
    cost=0.03,
    cases=lambda subject: [case for case in by_scheme(subject) if schemes_of(subject)[case["scheme"]].group[0] <= 1],
)
def pack_joined(run: Run) -> None:
    """Gate and up were two weights: where a tensor has one scale, each output of the first product has its own."""
    world = ExpertsWorld(run, joined=True)
    for tokens in (1, 9):
        world.check(world.inputs(tokens), f"{tokens} tokens, gate and up with scales of their own")


@check(Kind.EXPERTS, "experts.apply.none", Level.NUMERICS, cases=once, cost=0.01)
def apply_none(run: Run) -> None:
    """Without tokens the output is [0, in_features]."""
    world = ExpertsWorld(run)
    world.check(world.inputs(0), "no tokens")


@check(Kind.EXPERTS, "experts.apply.repeats", Level.NUMERICS, cases=once, cost=0.02)
def apply_repeats(run: Run) -> None:
    """A later call does not write into an earlier result."""
    world = ExpertsWorld(run)
    x, ids, shares = world.inputs(7)
    first = world.applied(x, ids, shares)
    kept = first.clone()
    world.applied(-x, ids, shares)
    if not torch.equal(kept, first):
        raise Failed("a later call wrote into an earlier result")


@check(Kind.EXPERTS, "experts.pack.bytes", Level.NUMERICS, cases=by_scheme, cost=0.02)
def pack_bytes(run: Run) -> None:
    """`num_bytes` says what the packed tensors hold, within an eighth."""
    world = ExpertsWorld(run)
    held = sum(tensor.numel() * tensor.element_size() for tensor in world.packed.values())
    said = world.plugin.num_bytes()
    if not isinstance(said, int) or abs(said - held) > BYTES_OFF * held:
        raise Failed(f"num_bytes is {said!r}, and the packed tensors hold {held} bytes")
