"""L2 of a checkpoint's tensors: each of them counts, and each that is missing or misshapen is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slotline.registry.descriptor import Kind
from slotline.registry.errors import ModelError
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.model_calls import KeptKeys
from slotline.testing.environments.model_family import (
    FamilyWorld,
    Patterns,
    by_example,
    examples_of,
    rewrite,
    tensors_in,
)

Tensors = dict[str, torch.Tensor]
LENGTH = 32
MOST = 14
"""Tensors of a checkpoint that are changed, one after the other."""


@check(Kind.MODEL_FAMILY, "model_family.weights.count", Level.HOSTILE, cases=by_example, cost=2.0)
def each_tensor_counts(run: Run) -> None:
    """A change of any tensor of the checkpoint changes what attention is handed, or the answers."""
    world = FamilyWorld(run)
    names = [name for name in _chosen(world) if not _unread(world, name)]
    base = None
    for name in ["", *names]:
        folder = world.copy()
        if name:
            rewrite(tensors_in(folder)[name], partial(_moved, name=name, seed=run.seed))
        answers = _all_of(world, world.load(folder))
        if base is None:
            base = answers
        elif _alike(base, answers):
            raise Failed(
                f"other numbers in {name} change nothing: it is not read. List it in `unread` if that is right"
            )


@check(Kind.MODEL_FAMILY, "model_family.weights.missing", Level.HOSTILE, cases=by_example, cost=2.0)
def a_missing_tensor_is_refused(run: Run) -> None:
    """Without one of its tensors a checkpoint is refused by the tensor's name, unless nothing depends on it."""
    optional = examples_of(run.subject)[run["example"]].optional

    def without(tensors: Tensors, name: str) -> Tensors:
        lacks = any(fnmatch(name, pattern) for pattern in optional)
        return tensors if lacks else {n: t for n, t in tensors.items() if n != name}

    _each(run, "without", without)


@check(Kind.MODEL_FAMILY, "model_family.weights.shape", Level.HOSTILE, cases=by_example, cost=1.0)
def a_misshapen_tensor_is_refused(run: Run) -> None:
    """A tensor with a row too few is refused by its name."""

    def shorter(tensors: Tensors, name: str) -> Tensors:
        return {**tensors, name: tensors[name][:-1]} if tensors[name].dim() and len(tensors[name]) > 1 else tensors

    _each(run, "with a row too few in", shorter, most=6)


@check(Kind.MODEL_FAMILY, "model_family.weights.whole_numbers", Level.HOSTILE, cases=by_example, cost=0.5)
def whole_numbers_are_refused(run: Run) -> None:
    """Weights of whole numbers, as a quantized checkpoint has them, are refused and not read as they are."""

    def whole(tensors: Tensors, name: str) -> Tensors:
        return {**tensors, name: (tensors[name] * 10).to(torch.int8)}

    _each(run, "with whole numbers in", whole, most=3, matrices=True)


@check(Kind.MODEL_FAMILY, "model_family.weights.precision", Level.HOSTILE, cases=by_example, cost=0.5)
def other_precision_is_read(run: Run) -> None:
    """Weights in bfloat16 are the same numbers in float32."""
    world = FamilyWorld(run)
    folders = [world.copy(), world.copy()]
    for folder, back in zip(folders, (torch.bfloat16, torch.float32), strict=True):
        for file in set(tensors_in(folder).values()):
            rewrite(file, partial(_rounded, back=back))
    models = [world.load(folder) for folder in folders]
    text = world.text(models[0], run.rng, 9)
    found, expected = (world.whole(model, text) for model in models)
    world.compare(found, expected, "weights that are stored in bfloat16")


def _rounded(tensors: Tensors, back: torch.dtype) -> Tensors:
    return {n: t.bfloat16().to(back) if t.dtype == torch.float32 else t for n, t in tensors.items()}


def _each(
    run: Run, what: str, change: Callable[[Tensors, str], Tensors], *, most: int = 1000, matrices: bool = False
) -> None:
    """Change one tensor of each pattern, and expect a refusal that names it, or the same answers."""
    world, rng = FamilyWorld(run), run.rng
    names = _chosen(world)
    rng.shuffle(names)
    base: list[torch.Tensor] | None = None
    tried = 0
    for name in names:
        folder = world.copy()
        file = tensors_in(folder)[name]
        changed = False

        def once(tensors: Tensors, name: str = name) -> Tensors:
            nonlocal changed
            if matrices and (tensors[name].dim() < 2 or _unread(world, name)):
                return tensors
            found = change(tensors, name)
            changed = found is not tensors
            return found

        rewrite(file, once)
        if not changed:
            continue
        tried += 1
        refusal = _refusal(world, folder, f"{what} {name}")
        if refusal is None:
            base = base or _all_of(world, world.load())
            if not _alike(base, _all_of(world, world.load(folder))):
                raise Failed(f"{what} {name}: it was loaded, and gives other numbers")
        elif not _names(refusal.message, name):
            raise Failed(f"{what} {name}: the refusal does not name it: {refusal}")
        elif not refusal.fix:
            raise Failed(f"{what} {name}: the refusal names no remedy: {refusal}")
        if tried == most:
            return


def _names(message: str, name: str) -> bool:
    """Return True if a message names a tensor: its end from the last number on, or the list that it is a part of.

    A library may put other words before a name, and make one tensor of those of a layer's experts.
    """
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    whole = len(numbers) > 1 and ".".join(parts[: numbers[-1]]) in message
    return whole or ".".join(parts[numbers[-1] if numbers else -2 :]) in message


def _refusal(world: FamilyWorld, folder: Path, what: str) -> ModelError | None:
    """Return what a folder is refused with, None if it is loaded."""
    try:
        world.load(folder)
    except ModelError as error:
        return error
    except Exception as error:  # a plugin may raise anything
        raise Failed(f"{what}: {type(error).__name__} instead of a ModelError: {error}") from error
    return None


def _chosen(world: FamilyWorld) -> list[str]:
    """Return a random tensor of each pattern of names, of a part of many patterns unless all are asked for."""
    return Patterns.of(tensors_in(world.folder())).some(world.run.rng, None if world.run.subject.exhaustive else MOST)


def _unread(world: FamilyWorld, name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in world.example.unread)


def _moved(tensors: Tensors, name: str, seed: int) -> Tensors:
    """Return the tensors with noise of its own size, and some more, on one."""
    tensor = tensors[name]
    if not tensor.is_floating_point():
        return {**tensors, name: tensor + 1}
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    size = float(tensor.float().std(correction=0)) + float(tensor.float().abs().mean()) + 0.05
    return {**tensors, name: (tensor.float() + 2 * size * noise).to(tensor.dtype)}


def _all_of(world: FamilyWorld, model: Any) -> list[torch.Tensor]:
    """Return what attention is handed in a step of two texts, the hidden states and the answers."""
    rng, cache = world.run.rng, KeptKeys(model.facts)
    cache.keeps = True
    item = 0 if world.example.item is not None else None
    texts = [world.text(model, rng, LENGTH, item=item), world.text(model, rng, 5)]
    hidden = world.step(model, cache, [(text, text.left) for text in texts])
    found = [*cache.seen, hidden.float().cpu(), world.answers(model, hidden)]
    if world.example.task != "generate":
        from slotline.registry.contracts.pooling import PoolingParams

        with torch.inference_mode():
            found.append(model.pooler.pool(hidden[:1].float(), [model.pooler.adjust(PoolingParams())]).cpu())
    return found


def _alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5)
        for a, b in zip(one, other, strict=True)
    )
