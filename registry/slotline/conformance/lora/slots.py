"""Slots over time: hot swap, capacity, and refusals that change nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from slotline.conformance.lora.faulty_folders import FAULTS, VARIANTS
from slotline.conformance.lora.numerics import once, ranks
from slotline.registry.descriptor import Kind
from slotline.registry.errors import CapacityError, RequestError
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.lora import LoraWorld
from slotline.testing.oracles.lora import Adapter
from slotline.testing.subject import Subject


@check(Kind.LORA, "lora.slots.hot_swap", Level.HOSTILE, cases=once, cost=0.04)
def slots_hot_swap(run: Run) -> None:
    """An adapter loaded where another was leaves no trace of it, and the others go on bit for bit."""
    with LoraWorld(run) as world:
        world.fill()
        for index in range(world.max_adapters):
            world.load(f"a{index}", world.adapter(ranks(run.subject)[-1]))
        for index in range(world.max_adapters):
            others = [name for name in world.loaded if name != f"a{index}"]
            before = _shares(world, others)
            world.unload(f"a{index}")
            world.load(f"b{index}", world.adapter(ranks(run.subject)[0], modules=list(world.modules)[index::2]))
            world.check([f"b{index}"] * 3 + [None, *others], f"'b{index}' where 'a{index}' was")
            _same(before, _shares(world, others), f"'b{index}' was loaded where 'a{index}' was")


@check(Kind.LORA, "lora.slots.reload", Level.HOSTILE, cases=once, cost=0.03)
def slots_reload(run: Run) -> None:
    """A name that was unloaded can be loaded again, with other weights, which are the ones that count."""
    with LoraWorld(run) as world:
        for rank in (*ranks(run.subject), ranks(run.subject)[0]):
            world.load("a", world.adapter(rank))
            world.check(["a", None, "a"], f"'a' loaded again with rank {rank}")
            world.unload("a")


@check(Kind.LORA, "lora.slots.third_time", Level.HOSTILE, cases=once, cost=0.15)
def slots_third_time(run: Run) -> None:
    """Names, slots and folders used five times, by adapters that are equal and others that only look equal."""
    with LoraWorld(run) as world:
        rank, equal = ranks(run.subject)[-1], world.adapter(ranks(run.subject)[-1])
        folders = [world.write(equal) for _ in range(world.max_adapters)]
        for turn in range(5):
            for index, folder in enumerate(folders):
                adapter = world.adapter(rank) if turn in (2, 3) else equal
                world.load(f"a{index}", adapter, world.write(adapter, folder))
            world.check([*world.loaded, None, *world.loaded], f"names, slots and folders of turn {turn + 1}")
            for index in range(world.max_adapters):
                world.unload(f"a{(index + turn) % world.max_adapters}")


@check(Kind.LORA, "lora.slots.capacity", Level.HOSTILE, cases=once)
def slots_capacity(run: Run) -> None:
    """One adapter more than max_adapters is refused with the number, changes nothing, and fits once one has left."""
    with LoraWorld(run) as world:
        world.fill()
        for index in range(world.max_adapters):
            world.load(f"a{index}", world.adapter(ranks(run.subject)[-1]))
        extra = world.adapter(1)
        path, wanted = world.write(extra), str(world.max_adapters)
        refused_and_unchanged(world, "extra", path, wanted, (RequestError, CapacityError))
        world.unload("a0")
        world.load("extra", extra)
        world.check(["extra", None, *world.loaded], "after the slot was freed")


@check(Kind.LORA, "lora.slots.unload_unknown", Level.HOSTILE, cases=once, cost=0.03)
def slots_unload_unknown(run: Run) -> None:
    """Unloading a name that is not loaded, or no longer, is refused with the name."""
    with LoraWorld(run) as world:
        world.load("a", world.adapter(1))
        world.unload("a")
        world.load("b", world.adapter(1))
        before = _shares(world, list(world.loaded))
        for name in ("a", "never_loaded"):
            try:
                world.lora.unload(name)
            except RequestError as error:
                if name not in str(error):
                    raise Failed(f"the refusal does not name {name!r}: {error}") from error
            else:
                raise Failed(f"unload({name!r}) went through; nothing of that name is loaded")
        _same(before, _shares(world, list(world.loaded)), "a refused unload")


def _fault_cases(subject: Subject) -> Iterable[Case]:
    undeclared = [name for name in VARIANTS if subject.refusal({name: True}) is not None]
    return [{"fault": fault} for _ in once(subject) for fault in (*FAULTS, *undeclared)]


@check(Kind.LORA, "lora.load.refuses", Level.HOSTILE, cases=_fault_cases, cost=0.2)
def load_refuses(run: Run) -> None:
    """A folder that cannot be held is refused with a RequestError that names the fault, and nothing changes."""
    with LoraWorld(run) as world:
        world.load("a", world.adapter(ranks(run.subject)[-1]))
        if world.max_adapters == 1:
            world.unload("a")
        path, wanted = {**FAULTS, **VARIANTS}[run["fault"]](world)
        refused_and_unchanged(world, "faulty", path, wanted, (RequestError,))
        world.load("faulty", world.adapter(1))  # the name and the slot are free
        while len(world.loaded) < world.max_adapters:
            world.load(f"b{len(world.loaded)}", world.adapter(1))
        world.check([None, *world.loaded], "after the refusal")


@check(
    Kind.LORA,
    "lora.load.patterns",
    Level.HOSTILE,
    cases=lambda subject: [{"pattern": name} for _ in once(subject) for name in ("rank_pattern", "alpha_pattern")],
)
def load_patterns(run: Run) -> None:
    """A rank_pattern or alpha_pattern is applied, or refused with a RequestError, and never ignored."""
    with LoraWorld(run) as world:
        rank, module = ranks(run.subject)[-1], next(iter(world.modules))
        full, special = world.adapter(rank), world.adapter(1, modules=[module])
        if run["pattern"] == "rank_pattern":
            adapter, pattern = Adapter({**full.weights, **special.weights}, rank, full.alpha), {module: 1}
        else:
            adapter, pattern = Adapter(full.weights, rank, full.alpha, alphas={module: 40}), {module: 40}
        try:
            world.load("a", adapter, world.write(adapter, None, **{run["pattern"]: pattern}))
        except RequestError:
            return
        world.check(["a"] * 4, f"{run['pattern']} {pattern}")


def refused_and_unchanged(
    world: LoraWorld, name: str, path: Path, wanted: str, errors: tuple[type[Exception], ...]
) -> None:
    """Load a folder that must be refused by name, and compare the other adapters' shares before and after."""
    before = _shares(world, list(world.loaded))
    try:
        slot = world.lora.load(name, str(path))
    except errors as error:
        said = str(error).replace(str(path.parent), "")  # a temporary folder's name says anything
        if not re.search(rf"(?<![a-z0-9]){re.escape(wanted)}", said, re.IGNORECASE):
            raise Failed(f"the refusal does not name {wanted!r}: {error}") from error
    else:
        raise Failed(f"load({name!r}) took slot {slot}; it must be refused and name {wanted!r}")
    _same(before, _shares(world, list(world.loaded)), "a refused load")
    try:
        world.lora.unload(name)
    except RequestError:
        return
    raise Failed(f"unload({name!r}) went through, though its load was refused")


def _shares(world: LoraWorld, names: list[str]) -> dict[str, Any]:
    """Return the contribution of each adapter on every module for fixed inputs."""
    shares: dict[str, torch.Tensor] = {}
    if names:
        world.plan([*names, None])
        for module, (inner, outer) in world.modules.items():
            device = world.run.subject.device.type
            inputs = torch.linspace(-1, 1, inner, device=device, dtype=world.torch_dtype).expand(len(names) + 1, inner)
            out = torch.ones(len(names) + 1, outer, device=device, dtype=world.torch_dtype)
            shares[module] = world.applied(module, inputs.contiguous(), out)
    return shares


def _same(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    for module, share in before.items():
        if not torch.equal(share, after[module]):
            raise Failed(f"{what}, and the other adapters' share of {module} changed")
