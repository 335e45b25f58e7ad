"""L1 of weight formats: what is read equals a float64 oracle of what was stored."""

from __future__ import annotations

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.weight_format import PLAIN, FormatWorld, MemoryReader, by_example

_TENSORS = ("codes", "scales", "offsets", "g_idx")


@check(Kind.WEIGHT_FORMAT, "weight_format.read.values", Level.NUMERICS, cases=by_example, cost=0.02)
def read_values(run: Run) -> None:
    """The weight of each module is the stored one: codes, scales, zero points and order."""
    world = FormatWorld(run)
    weights = world.weights()
    built = world.build(MemoryReader(world.tensors(weights)))
    for name, weight in weights.items():
        world.check(built, name, weight)


@check(Kind.WEIGHT_FORMAT, "weight_format.read.repeats", Level.NUMERICS, cases=by_example, cost=0.02)
def read_repeats(run: Run) -> None:
    """Reading twice gives the same bits, and leaves the checkpoint's tensors as they are."""
    world = FormatWorld(run)
    name, weight = world.names[0], world.weight()
    reader = MemoryReader(world.tensors({name: weight}))
    before = {key: tensor.clone() for key, tensor in reader.tensors.items()}
    built = world.build(reader)
    first, second = (built.read(name, world.kind) for _ in range(2))
    for part in _TENSORS:
        one, other = getattr(first, part), getattr(second, part)
        if (one is None) != (other is None) or (one is not None and not _same(one, other)):
            raise Failed(f"{name}: reading it twice gave different {part}")
    for key, tensor in before.items():
        if not _same(tensor, reader.tensors[key]):
            raise Failed(f"{name}: reading it changed the tensor {key}")


def _same(one: object, other: object) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


@check(Kind.WEIGHT_FORMAT, "weight_format.read.plain", Level.NUMERICS, cases=by_example, cost=0.01)
def read_plain(run: Run) -> None:
    """A module that the configuration leaves out has no scheme."""
    world = FormatWorld(run)
    built = world.build(MemoryReader(world.tensors({world.names[0]: world.weight()})))
    if (scheme := built.scheme_of(PLAIN, "head")) is not None:
        raise Failed(f"{PLAIN} is plain, and scheme_of gave {scheme}")


@check(Kind.WEIGHT_FORMAT, "weight_format.read.own", Level.NUMERICS, cases=by_example, cost=0.01)
def read_own(run: Run) -> None:
    """A module is read from its own tensors, and none is read before: a large checkpoint is never read as a whole."""
    world = FormatWorld(run)
    weights = world.weights()
    reader = MemoryReader(world.tensors(weights))
    built = world.build(reader)
    if reader.names:
        raise Failed(f"the factory read {reader.names[0]}, before any module was asked for")
    for name in weights:
        reader.names.clear()
        built.read(name, world.kind)
        if foreign := [other for other in reader.names if not other.startswith(name)]:
            raise Failed(f"{name}: it read {foreign[0]}")
