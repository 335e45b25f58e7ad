"""L2 of linear plugins: borders of groups, odd sizes, extreme codes, several weights, shards, strange neighbours."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from attrs import evolve

from slotline.registry.contracts.weights import concatenate
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.linear import LinearWorld, by_first_dtype, schemes_of
from slotline.testing.subject import Subject


@check(Kind.LINEAR, "linear.apply.borders", Level.HOSTILE, cases=by_first_dtype, cost=0.02)
def apply_borders(run: Run) -> None:
    """A single input on either side of a group's border meets its own codes and its own group's scale."""
    world = LinearWorld(run)
    weight = world.weight()
    packed = world.pack(weight)
    size = world.scheme.group[1] or world.in_features
    places = {0, 1, world.in_features - 1, world.in_features // 2}
    places |= {place for border in range(size, world.in_features, size) for place in (border - 1, border)}
    x = torch.zeros(len(places), world.in_features, dtype=world.dtype, device=world.device)
    for token, place in enumerate(sorted(places)):
        x[token, place] = 1.5
    world.check(x, packed, weight, "one input at a time")
    for token in range(len(places)):
        world.check(x[token : token + 1].clone(), packed, weight, f"input {sorted(places)[token]} alone")


@check(Kind.LINEAR, "linear.apply.sizes", Level.HOSTILE, cases=by_first_dtype, cost=0.05)
def apply_sizes(run: Run) -> None:
    """Odd numbers of outputs, a single one, and small and large numbers of inputs, as far as they are declared."""
    for out_features, in_features in ((1, 32), (7, 96), (33, 160), (130, 64), (19, 1056)):
        world = LinearWorld(run, out_features, in_features)
        weight = world.weight()
        packed = world.pack(weight)
        for tokens in (1, 3, 33):
            what = f"{world.in_features} -> {world.out_features}, {tokens} tokens"
            world.check(world.inputs(tokens), packed, weight, what)


def _blocks(subject: Subject) -> Iterable[Case]:
    found = [name for name, scheme in schemes_of(subject).items() if scheme.granularity == "block"]
    if not found:
        raise NotApplicable("no scheme of blocks is declared")
    return [case for case in by_first_dtype(subject) if case["scheme"] in found]


@check(Kind.LINEAR, "linear.apply.ragged", Level.HOSTILE, needs={"ragged": True}, cases=_blocks, cost=0.02)
def apply_ragged(run: Run) -> None:
    """Blocks that divide neither outputs nor inputs end where the weight ends."""
    columns = next(iter([schemes_of(run.subject)[run["scheme"]].group[1]]))
    world = LinearWorld(run, 149, columns + columns // 2 + 2, ragged=True)
    weight = world.weight()
    packed = world.pack(weight)
    for tokens in (1, 20):
        world.check(world.inputs(tokens), packed, weight, f"{world.in_features} -> {world.out_features}")


@check(Kind.LINEAR, "linear.apply.extremes", Level.HOSTILE, cases=by_first_dtype, cost=0.02)
def apply_extremes(run: Run) -> None:
    """The lowest and the highest codes, and scales that are zero or negative, mean what the scheme says."""
    world = LinearWorld(run)
    weight, element = world.weight(), world.scheme.element
    codes = weight.codes.clone()
    if element.codes.startswith("float8"):
        bits = codes.view(torch.uint8)
        bits[0], bits[1], bits[2], bits[3] = 0x7E, 0xFE, 0x01, 0x80  # largest, smallest, subnormal, minus zero
    else:
        codes[0], codes[1], codes[2, ::2], codes[2, 1::2] = element.low, element.high, element.low, element.high
    scales = weight.scales.clone()
    if scales.numel() > 2 and world.scheme.name != "mxfp4":
        scales.view(-1)[0], scales.view(-1)[-1] = 0.0, -scales.view(-1)[-1]
    weight = evolve(weight, codes=codes, scales=scales)
    packed = world.pack(weight)
    for tokens in (1, 24):
        world.check(world.inputs(tokens), packed, weight, f"{tokens} tokens")


@check(Kind.LINEAR, "linear.apply.tokens", Level.HOSTILE, cases=by_first_dtype, cost=0.05)
def apply_tokens(run: Run) -> None:
    """Every number of tokens up to 40 gives the same product: no tile and no threshold loses one."""
    world = LinearWorld(run, 40, 64)
    weight = world.weight()
    packed = world.pack(weight)
    for tokens in range(1, 41):
        world.check(world.inputs(tokens), packed, weight, f"{tokens} tokens")


@check(Kind.LINEAR, "linear.apply.neighbours", Level.HOSTILE, cases=by_first_dtype, cost=0.02)
def apply_neighbours(run: Run) -> None:
    """NaN, infinity and large values of one token leave the others' outputs as they are."""
    world = LinearWorld(run)
    weight = world.weight()
    packed = world.pack(weight)
    for tokens in (3, 20):
        x = world.inputs(tokens)
        strange = x.clone()
        strange[1] = float("nan")
        strange[1, 3] = float("inf")
        out = world.applied(strange, packed, world.out_features)
        rest = [token for token in range(tokens) if token != 1]
        world.compare(out[rest], x[rest], weight, "beside a token of NaN")


@check(Kind.LINEAR, "linear.pack.several", Level.HOSTILE, cases=by_first_dtype, cost=0.02)
def pack_several(run: Run) -> None:
    """One instance serves several weights, in any order, and a packed weight does not hang on what was packed."""
    world = LinearWorld(run)
    weights = [world.weight() for _ in range(3)]
    packed = [world.pack(weight) for weight in weights]
    for index in (2, 0, 1, 0):
        world.check(world.inputs(2), packed[index], weights[index], f"weight {index} of 3")
    moved = {name: tensor.clone() for name, tensor in packed[1].items()}
    world.check(world.inputs(2), moved, weights[1], "a copy of packed tensors")


@check(Kind.LINEAR, "linear.pack.joined", Level.HOSTILE, cases=by_first_dtype, cost=0.02)
def pack_joined(run: Run) -> None:
    """Weights that are joined along the outputs have more outputs than the context says."""
    world = LinearWorld(run, 64)
    block = world.scheme.group[0]
    if block == 0 or world.scheme.act_order or world.out_features % block:
        raise NotApplicable("the host joins no weights of this scheme")
    weight = concatenate([world.weight(), world.weight()])
    if run.subject.capabilities.out_features.refusal(weight.out_features) is not None:
        raise NotApplicable(f"{weight.out_features} outputs are not declared")
    packed = world.pack(weight)
    for tokens in (1, 18):
        world.check(world.inputs(tokens), packed, weight, "two weights joined")


@check(Kind.LINEAR, "linear.pack.shards", Level.HOSTILE, cases=by_first_dtype, cost=0.02)
def pack_shards(run: Run) -> None:
    """Half of the outputs, packed by itself, gives that half of the product."""
    world = LinearWorld(run, 256)
    half = world.out_features // 2
    if world.scheme.group[0] > 1 and half % world.scheme.group[0]:
        raise NotApplicable("no border of blocks is in the middle")
    if run.subject.capabilities.out_features.refusal(half) is not None:
        raise NotApplicable(f"{half} outputs are not declared")
    weight = world.weight()
    for start in (0, half):
        shard = weight.rows(start, start + half)
        for tokens in (1, 18):
            world.check(world.inputs(tokens), world.pack(shard), shard, f"outputs from {start} on")


@check(
    Kind.LINEAR,
    "linear.apply.invariant",
    Level.HOSTILE,
    needs={"batch_invariant": True},
    cases=by_first_dtype,
    cost=0.03,
)
def apply_invariant(run: Run) -> None:
    """A token's outputs are bitwise the same alone and in any batch, and right, with few and with many inputs."""
    for out_features, in_features in ((192, 256), (40, 3072)):
        world = LinearWorld(run, out_features, in_features, batch_invariant=True)
        weight = world.weight()
        packed = world.pack(weight)
        x = world.inputs(33)
        alone = torch.cat([world.applied(x[i : i + 1].clone(), packed, world.out_features) for i in range(33)])
        world.compare(alone, x, weight, "each token by itself")
        for start, stop in ((0, 2), (0, 8), (3, 20), (32, 33), (0, 33)):
            together = world.applied(x[start:stop].clone(), packed, world.out_features)
            if not torch.equal(together, alone[start:stop]):
                raise Failed(f"{stop - start} tokens together have other bits than each by itself")
