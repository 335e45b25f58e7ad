"""L1 of linear plugins: products with each declared scheme and dtype against a float64 oracle."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.linear import LinearWorld, by_first_dtype, by_scheme

FEW, MANY = (1, 2, 5), (17, 64)
BYTES_OFF = 0.125
"""Share by which `num_bytes` may differ from the packed tensors."""


@check(Kind.LINEAR, "linear.apply.few", Level.NUMERICS, cases=by_scheme, cost=0.02, profile="decode")
def apply_few(run: Run) -> None:
    """The product of a few tokens is that of the dequantized weight."""
    world = LinearWorld(run)
    weight = world.weight()
    packed = world.pack(weight)
    for tokens in FEW:
        world.check(world.inputs(tokens), packed, weight, f"{tokens} tokens")


@check(Kind.LINEAR, "linear.apply.many", Level.NUMERICS, cases=by_scheme, cost=0.03, profile="prefill")
def apply_many(run: Run) -> None:
    """The product of many tokens is that of the dequantized weight."""
    world = LinearWorld(run)
    weight = world.weight()
    packed = world.pack(weight)
    for tokens in MANY:
        world.check(world.inputs(tokens), packed, weight, f"{tokens} tokens")


@check(Kind.LINEAR, "linear.apply.none", Level.NUMERICS, cases=by_first_dtype, cost=0.01)
def apply_none(run: Run) -> None:
    """Without tokens the product is [0, out_features]."""
    world = LinearWorld(run)
    weight = world.weight()
    world.check(world.inputs(0), world.pack(weight), weight, "no tokens")


@check(Kind.LINEAR, "linear.apply.repeats", Level.NUMERICS, cases=by_first_dtype, cost=0.01)
def apply_repeats(run: Run) -> None:
    """The same call twice gives the same bits, in tensors of their own."""
    world = LinearWorld(run)
    weight = world.weight()
    packed = world.pack(weight)
    for tokens in (1, 9):
        x = world.inputs(tokens)
        first = world.applied(x, packed, world.out_features)
        kept = first.clone()
        second = world.applied(x, packed, world.out_features)
        if not torch.equal(kept, second):
            raise Failed(f"{tokens} tokens: two calls with the same inputs gave different outputs")
        world.applied(-x, packed, world.out_features)
        if not torch.equal(kept, first):
            raise Failed(f"{tokens} tokens: a later call wrote into an earlier result")


@check(Kind.LINEAR, "linear.pack.bytes", Level.NUMERICS, cases=by_first_dtype, cost=0.01)
def pack_bytes(run: Run) -> None:
    """`num_bytes` says what the packed tensors hold, within an eighth."""
    world = LinearWorld(run, 256, 512)
    packed = world.pack(world.weight())
    held = sum(tensor.numel() * tensor.element_size() for tensor in packed.values())
    said = world.linear.num_bytes(world.out_features, world.in_features)
    if not isinstance(said, int) or abs(said - held) > BYTES_OFF * held:
        raise Failed(f"num_bytes is {said!r}, and the packed tensors hold {held} bytes")


@check(Kind.LINEAR, "linear.rounded", Level.NUMERICS, needs={"rounded_inputs": True}, cases=by_scheme)
def rounded(run: Run) -> None:
    """Inputs that were rounded before are codes times scales of their groups, for one token, several and none."""
    world = LinearWorld(run)
    linear: Any = world.linear
    groups = linear.rounded_groups()
    if type(groups) is not int or groups < 0 or (groups and world.in_features % groups):
        raise Failed(f"rounded_groups gives {groups!r:.40}, wanted a divisor of {world.in_features} inputs, or 0")
    if not groups:
        raise NotApplicable("inputs of this scheme cannot be rounded before")
    weight = world.weight()
    packed = world.pack(weight)
    for tokens in (1, 5, 33, 0):
        shape = (tokens, world.in_features)
        codes = torch.randint(-127, 128, shape, generator=world.generator, dtype=torch.int8).to(world.device)
        scales = torch.rand(tokens, groups, generator=world.generator) / 64
        scales[:, ::3] *= 8
        scales = scales.to(world.device)
        before = codes.clone(), scales.clone()
        out = linear.apply_rounded(codes, scales, packed, world.out_features)
        if out.shape != (tokens, world.out_features) or out.dtype != world.dtype:
            raise Failed(f"apply_rounded returned {out.dtype} {tuple(out.shape)} of {tokens} tokens, not {world.dtype}")
        if not (torch.equal(codes, before[0]) and torch.equal(scales, before[1])):
            raise Failed("apply_rounded changed its inputs")
        x = (codes.unflatten(1, (groups, -1)) * scales[..., None]).flatten(1)
        world.compare(out, x, weight, f"{tokens} rounded tokens", rounds="")
