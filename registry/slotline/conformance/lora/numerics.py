"""Contribution of an adapter in benign surroundings: each dtype, rank, scale and module against the oracle."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.lora import HIGHEST_RANK, LoraWorld, dtypes_of, modules_of
from slotline.testing.subject import Subject


def by_dtype(subject: Subject) -> Iterable[Case]:
    """Return a case for each declared dtype."""
    modules_of(subject)
    return [{"dtype": dtype} for dtype in dtypes_of(subject)]


def once(subject: Subject) -> Iterable[Case]:
    """Return one case if there is a module and a dtype to check with."""
    modules_of(subject), dtypes_of(subject)
    return ({},)


def ranks(subject: Subject) -> list[int]:
    """Return the lowest, a middle and the highest rank that the checks use."""
    highest = min(HIGHEST_RANK, subject.capabilities.max_rank.limit or HIGHEST_RANK)
    return sorted({1, (highest + 2) // 2, highest})


@check(Kind.LORA, "lora.apply.none", Level.NUMERICS, cases=by_dtype, cost=0.02)
def apply_none(run: Run) -> None:
    """Without an adapter the output is unchanged, before anything is loaded and next to a loaded adapter."""
    with LoraWorld(run, run["dtype"]) as world:
        world.check([None] * 5, "nothing loaded")
        world.load("a", world.adapter(ranks(run.subject)[-1]))
        world.check([None] * 5, "one adapter loaded, none used")


@check(
    Kind.LORA,
    "lora.apply.one",
    Level.NUMERICS,
    cost=0.05,
    cases=lambda subject: [{**case, "rank": rank} for case in by_dtype(subject) for rank in ranks(subject)],
)
def apply_one(run: Run) -> None:
    """One adapter on all tokens adds its share, inputs @ A^T @ B^T * alpha / r, to each module's output."""
    with LoraWorld(run, run["dtype"]) as world:
        world.load("a", world.adapter(run["rank"]))
        for num_tokens in (1, 7, world.max_tokens):
            world.check(["a"] * num_tokens, f"rank {run['rank']}, {num_tokens} tokens")


@check(
    Kind.LORA,
    "lora.apply.scale",
    Level.NUMERICS,
    cost=0.03,
    cases=lambda subject: [{"alpha": alpha} for _ in once(subject) for alpha in (1, 5.5, 32)],
)
def apply_scale(run: Run) -> None:
    """The share is scaled by lora_alpha / r, whole numbers and fractions alike."""
    with LoraWorld(run) as world:
        for rank in ranks(run.subject):
            name = f"rank{rank}"
            world.load(name, world.adapter(rank, alpha=run["alpha"]))
            world.check([name] * 4, f"lora_alpha {run['alpha']}, rank {rank}")
            world.unload(name)


@check(Kind.LORA, "lora.apply.rslora", Level.NUMERICS, needs={"rslora": True}, cases=by_dtype)
def apply_rslora(run: Run) -> None:
    """With use_rslora the share is scaled by lora_alpha / sqrt(r)."""
    with LoraWorld(run, run["dtype"]) as world:
        world.load("stabilised", world.adapter(ranks(run.subject)[-1], rslora=True))
        world.check(["stabilised"] * 4, "use_rslora")


@check(Kind.LORA, "lora.apply.modules", Level.NUMERICS, cases=once, cost=0.2)
def apply_modules(run: Run) -> None:
    """Each module of each layer gets its own weights, in whatever order they are called, and more than once."""
    with LoraWorld(run) as world:
        world.load("a", world.adapter(ranks(run.subject)[-1]))
        order = list(world.modules) * 2
        run.rng.shuffle(order)
        world.check(["a"] * 5, "modules in another order", modules=order)


@check(
    Kind.LORA,
    "lora.apply.embedding",
    Level.NUMERICS,
    needs={"embeddings": True},
    cost=0.05,
    cases=lambda subject: [{**case, "rank": rank} for case in by_dtype(subject) for rank in ranks(subject)],
)
def apply_embedding(run: Run) -> None:
    """An adapter of an embedding adds the row of A^T that each token's id names, @ B^T * alpha / r."""
    with LoraWorld(run, run["dtype"], embeds=True) as world:
        world.load("a", world.adapter(run["rank"]))
        for num_tokens in (1, 7, world.max_tokens):
            world.check(["a"] * num_tokens, f"rank {run['rank']}, {num_tokens} tokens")


@check(Kind.LORA, "lora.apply.extended", Level.NUMERICS, needs={"extended": True}, cases=by_dtype, cost=0.05)
def apply_extended(run: Run) -> None:
    """With matrices A after the base model's weights, `expand` adds what `apply` adds, and `apply` still does."""
    with LoraWorld(run, run["dtype"], extends=True) as world:
        world.load("a", world.adapter(ranks(run.subject)[-1]))
        world.check(["a"] * 7, "the product with the room given")
        world.rooms.clear()
        world.check(["a"] * 7, "the inputs given")


@check(Kind.LORA, "lora.load.slots", Level.NUMERICS, cases=once, cost=0.05)
def load_slots(run: Run) -> None:
    """Each loaded adapter has a slot of its own, from 0 to max_adapters - 1, and all of them can be filled."""
    with LoraWorld(run) as world:
        for index in range(world.max_adapters):
            world.load(f"a{index}", world.adapter(1))


@check(Kind.LORA, "lora.apply.repeats", Level.NUMERICS, cases=once)
def apply_repeats(run: Run) -> None:
    """The same call twice gives the same bits."""
    with LoraWorld(run) as world:
        world.load("a", world.adapter(ranks(run.subject)[-1]))
        world.plan(["a", None] * 6)
        for module in world.modules:
            inputs, out = world.tensors(module)
            if not torch.equal(world.applied(module, inputs, out), world.applied(module, inputs, out)):
                raise Failed(f"{module}: two calls with the same inputs gave different outputs")
