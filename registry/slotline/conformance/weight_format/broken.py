"""L2 of weight formats: checkpoints that are broken are refused with the tensor's name, and never read wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from slotline.registry.descriptor import Kind
from slotline.registry.errors import ModelError
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.weight_format import FormatWorld, MemoryReader, by_example

Tensors = dict[str, torch.Tensor]


@check(Kind.WEIGHT_FORMAT, "weight_format.broken.missing", Level.HOSTILE, cases=by_example, cost=0.02)
def broken_missing(run: Run) -> None:
    """Without one of its tensors a module is refused by the tensor's name, or plain, or does not need it."""

    def without(tensors: Tensors, name: str) -> Tensors:
        return {key: tensor for key, tensor in tensors.items() if key != name}

    _each_tensor(run, "without", without, whole_name=True)


@check(Kind.WEIGHT_FORMAT, "weight_format.broken.shape", Level.HOSTILE, cases=by_example, cost=0.03)
def broken_shape(run: Run) -> None:
    """A tensor with a row or a column too few or too many is refused by name, unless the weight's size shows it."""
    for dim in (0, -1):
        for what, by in (("less", -1), ("more", 1)):
            _each_tensor(run, f"{what} in dimension {dim} of", partial(_resized, dim=dim, by=by))


@check(Kind.WEIGHT_FORMAT, "weight_format.broken.dtype", Level.HOSTILE, cases=by_example, cost=0.02)
def broken_dtype(run: Run) -> None:
    """A tensor of another dtype is refused by name, unless it means the same."""

    def other(tensors: Tensors, name: str) -> Tensors:
        tensor = tensors[name]
        if tensor.dtype == torch.float8_e4m3fn:
            return {**tensors, name: tensor.view(torch.uint8)}
        changed = tensor.double() if tensor.dtype.is_floating_point else tensor.float() + 0.25
        return {**tensors, name: changed}

    _each_tensor(run, "another dtype of", other)


@check(Kind.WEIGHT_FORMAT, "weight_format.broken.cut", Level.HOSTILE, cases=by_example, cost=0.02)
def broken_cut(run: Run) -> None:
    """A tensor that its file cannot give any more, because it was cut, ends the reading with the file's own error."""
    world = FormatWorld(run)
    name, weight = world.names[0], world.weight()
    tensors = world.tensors({name: weight})
    used = MemoryReader(tensors)
    built = world.build(used)
    built.scheme_of(name, world.kind)
    built.read(name, world.kind)
    for broken in dict.fromkeys(used.names):
        what = f"a file that was cut in {broken}"
        _expect(world, MemoryReader(tensors, broken), name, weight, what, broken, alike=False)


def _each_tensor(
    run: Run, what: str, change: Callable[[Tensors, str], Mapping[str, Any] | None], *, whole_name: bool = False
) -> None:
    """Change each tensor of a module in turn, and expect a refusal."""
    world = FormatWorld(run)
    name, weight = world.names[0], world.weight(40, 256)
    tensors = world.tensors({name: weight})
    for changed in [key for key in tensors if key.startswith(name)]:
        broken = change(tensors, changed)
        if broken is not None:
            wanted = changed if whole_name else name
            _expect(world, MemoryReader(broken), name, weight, f"{what} {changed}", wanted, alike=True)


def _expect(
    world: FormatWorld,
    reader: MemoryReader,
    name: str,
    weight: Any,
    what: str,
    named: str,
    *,
    alike: bool,
) -> None:
    """Expect a typed error that names a tensor, or what the host sees: a plain module, a size, or the same weight."""
    try:
        built = world.build(reader)
        if built.scheme_of(name, world.kind) is None and alike:
            return
        found = built.read(name, world.kind)
        found.check(name)
    except ModelError as error:
        if named not in error.message or not error.fix:
            raise Failed(f"{what}: the refusal names neither {named} nor a remedy: {error}") from error
        return
    except Exception as error:  # a plugin may raise anything
        raise Failed(f"{what}: {type(error).__name__} instead of a ModelError: {error}") from error
    if not alike:
        raise Failed(f"{what}: it was read all the same")
    if found.codes.shape == weight.codes.shape:
        world.compare(found, weight, f"{what}, read all the same")


def _resized(tensors: Tensors, name: str, dim: int, by: int) -> Tensors | None:
    """Return the tensors with one more or one less in a dimension of one. None if it has none."""
    tensor = tensors[name]
    if tensor.dim() == 0 or tensor.shape[dim] + by < 1:
        return None
    raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    size = tensor.shape[dim]
    changed = raw.narrow(dim, 0, size - 1) if by < 0 else torch.cat((raw, raw.narrow(dim, size - 1, 1)), dim)
    return {**tensors, name: changed.contiguous().view(tensor.dtype)}
