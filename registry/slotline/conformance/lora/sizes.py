"""Sizes behind powers of two, where tiles, masks and names end: slots, ranks, modules, layers and batches."""

from __future__ import annotations

from collections.abc import Iterable

from slotline.conformance.lora.numerics import once
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, NotApplicable, Run, check
from slotline.testing.environments.lora import HIGHEST_RANK, LoraWorld, dtypes_of
from slotline.testing.sizes import behind
from slotline.testing.subject import Subject

SIZES = "sizes"
MOST_SLOTS, MOST_RANK, MOST_TOKENS = 33, 96, 1030
LAYERS = (1, 2, 10, 11, 12, 101)
"""Numbers that begin or end with each other, so that a part of a name is not enough."""
SQUARE = ((48, 48), (64, 64), (33, 33))
WIDE = ((136, 264), (264, 136), (520, 129))


def by_rank(subject: Subject) -> Iterable[Case]:
    """Return ranks behind powers of two, above those of the other checks.

    Raises:
        NotApplicable: if none is declared.
    """
    limit = subject.capabilities.max_rank.limit or MOST_RANK
    found = [rank for rank in behind(min(MOST_RANK, limit), start=HIGHEST_RANK) if rank > HIGHEST_RANK]
    if not found:
        raise NotApplicable(f"no rank above {HIGHEST_RANK} is declared")
    return [{"rank": rank} for _ in once(subject) for rank in found]


@check(Kind.LORA, "lora.sizes.ranks", Level.NUMERICS, cases=by_rank, profile=SIZES, cost=0.03)
def sizes_ranks(run: Run) -> None:
    """Ranks behind powers of two add their share."""
    rank = run["rank"]
    with LoraWorld(run, max_rank=rank, layers=(0,)) as world:
        world.load("high", world.adapter(rank))
        world.check(["high"] * 5, f"rank {rank}")


@check(Kind.LORA, "lora.sizes.mixed", Level.HOSTILE, cases=by_rank, profile=SIZES, cost=0.03)
def sizes_mixed(run: Run) -> None:
    """Ranks behind powers of two beside the lowest rank in the same batch, in slots that held the highest."""
    rank = run["rank"]
    with LoraWorld(run, max_rank=rank, max_adapters=2, layers=(0,)) as world:
        world.fill()
        world.load("high", world.adapter(rank))
        if world.max_adapters > 1:
            world.load("low", world.adapter(1))
        world.check([*world.loaded, None, *world.loaded, "high"], f"ranks {rank} and 1")


@check(Kind.LORA, "lora.sizes.slots", Level.HOSTILE, cases=once, profile=SIZES, cost=0.4)
def sizes_slots(run: Run) -> None:
    """Every slot of many is its own: all are filled, one token of each, then some change hands."""
    with LoraWorld(run, max_adapters=MOST_SLOTS, max_tokens=2 * MOST_SLOTS, layers=(0,)) as world:
        for index in range(world.max_adapters):
            world.load(f"a{index}", world.adapter(1 + index % 2 if world.max_rank > 1 else 1))
        world.check([*world.loaded], f"one token of each of {world.max_adapters} adapters")
        for index in range(0, world.max_adapters, 5):
            world.unload(f"a{index}")
            world.load(f"b{index}", world.adapter(1))
        world.check([*reversed(list(world.loaded)), None], "every fifth slot with another adapter")


@check(Kind.LORA, "lora.sizes.layers", Level.HOSTILE, cases=once, profile=SIZES, cost=0.1)
def sizes_layers(run: Run) -> None:
    """Layers whose numbers begin or end with each other have weights of their own, of all layers and of some."""
    with LoraWorld(run, layers=LAYERS) as world:
        world.load("all", world.adapter(1))
        world.check(["all", None], "an adapter of all layers")
        world.unload("all")
        for one in (1, 11, 101):
            only = [module for module in world.modules if f".layers.{one}." in module]
            world.load(f"layer {one}", world.adapter(1, modules=only))
            world.check([f"layer {one}", None], f"an adapter of layer {one} only")
            world.unload(f"layer {one}")


@check(
    Kind.LORA,
    "lora.sizes.modules",
    Level.NUMERICS,
    cases=lambda subject: [{"square": square} for _ in once(subject) for square in (True, False)],
    profile=SIZES,
    cost=0.1,
)
def sizes_modules(run: Run) -> None:
    """Square modules, whose A and B may have one shape, and modules with sizes behind powers of two."""
    sizes = SQUARE if run["square"] else WIDE
    rank = min(run.subject.capabilities.max_rank.limit or SQUARE[0][0], SQUARE[0][0])
    with LoraWorld(run, sizes=sizes, max_rank=rank, layers=(0,)) as world:
        for of_rank in sorted({1, rank}):
            world.load(f"rank {of_rank}", world.adapter(of_rank))
            world.check([f"rank {of_rank}", None, f"rank {of_rank}"], f"modules {sizes}, rank {of_rank}")
            world.unload(f"rank {of_rank}")


def by_tokens(subject: Subject) -> Iterable[Case]:
    """Return the numbers of tokens behind powers of two, with each dtype once."""
    dtypes = [dtype for _ in once(subject) for dtype in dtypes_of(subject)]
    sizes = [size for size in behind(MOST_TOKENS, start=32) if size & (size - 1)]
    return [{"num_tokens": size, "dtype": dtypes[index % len(dtypes)]} for index, size in enumerate(sizes)]


@check(Kind.LORA, "lora.sizes.tokens", Level.HOSTILE, cases=by_tokens, profile=SIZES, cost=0.1)
def sizes_tokens(run: Run) -> None:
    """Long batches: each token, the last one too, gets the share of its adapter, mixed and in long runs of one."""
    count = run["num_tokens"]
    with LoraWorld(run, run["dtype"], max_tokens=count, layers=(0,)) as world:
        for index in range(world.max_adapters):
            world.load(f"a{index}", world.adapter(1 + index % 2 if world.max_rank > 1 else 1))
        names = list(world.loaded)
        first, last = names[0], names[-1]
        world.check([*world.names(count - 1), last], f"a mixed batch of {count} tokens")
        world.check([first] * (count - 1) + [last], f"{count - 1} tokens of one adapter before one of another")
