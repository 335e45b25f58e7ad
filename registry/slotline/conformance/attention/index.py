"""Layers whose index picks keys: which are picked, what is stored, and layers that use the picks of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import evolve

from slotline.conformance.attention.features import TREES, one_tree, own_trees
from slotline.registry.contracts.cache_tensors import LATENT_INDEX
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, NotApplicable, Run, check
from slotline.testing.environments.attention_case import Case as AttentionCase
from slotline.testing.environments.attention_choice import (
    chosen,
    device_of,
    dtype_pairs,
    layouts,
    prove,
    refusal,
    writes_cache,
)
from slotline.testing.environments.attention_index import IndexedWorld, SharingWorld
from slotline.testing.environments.attention_shapes import Requests, decode, mixed
from slotline.testing.subject import Subject

NEEDS = {"index_topk": True, "mla": True}
INDEX: dict[str, Any] = {"mla": True, "index_topk": 7, "cache_format": LATENT_INDEX}
SIZES = ((1, 16), (3, 20), (16, 8), (64, 128))
"""Heads and head sizes of an index: the smallest, one of no power of two, many small ones, and DeepSeek-V3.2's."""
ALIKE = ((1, 40), (1, 40), (3, 50), (3, 50))
"""Requests of equal lengths, whose picks differ."""
TOPK = (1, 16, 33, 100, 250)
"""Numbers of keys, below and above a tile, and all but a few of the longest request."""


def by_pair(subject: Subject) -> Iterable[Case]:
    """Return each pair of dtypes that is declared together with an index, and layouts in turn."""
    features = {**NEEDS, "cache_formats": LATENT_INDEX}
    pairs = [pair for pair in dtype_pairs(subject) if refusal(subject, {**features, "dtypes": pair}) is None]
    if not pairs:
        raise NotApplicable("no dtype pair is declared together with an index")
    orders = layouts(subject)
    return [
        {**INDEX, "dtype": dtype, "kv_dtype": kv_dtype, "layout": orders[i % len(orders)]}
        for i, (dtype, kv_dtype) in enumerate(pairs)
    ]


@check(Kind.ATTENTION, "attention.index", Level.NUMERICS, needs=NEEDS, cases=by_pair, profile="mixed")
def picks(run: Run) -> None:
    """Queries attend to the keys with the highest scores, in decode and in mixed batches, and to all if there are few.

    Scores are exact in every dtype, and of equal ones the lower positions count.
    """
    for requests in (decode, mixed):
        prove(run, chosen(run, requests).friendly())


@check(
    Kind.ATTENTION,
    "attention.index.topk",
    Level.NUMERICS,
    needs=NEEDS,
    cases=lambda _: [{**INDEX, "index_topk": most} for most in TOPK],
)
def numbers_of_keys(run: Run) -> None:
    """So many keys as the layer says, whatever their number."""
    prove(run, chosen(run, ((1, 300), (1, 90), (3, 40), (20, 20))).friendly())


@check(
    Kind.ATTENTION,
    "attention.index.shapes",
    Level.NUMERICS,
    needs=NEEDS,
    cases=lambda _: [{**INDEX, "index_heads": heads, "index_size": size} for heads, size in SIZES],
)
def shapes(run: Run) -> None:
    """Any number of index heads, of any size."""
    prove(run, chosen(run, mixed).friendly())


@check(
    Kind.ATTENTION,
    "attention.index.equal",
    Level.NUMERICS,
    needs=NEEDS,
    cases=lambda _: [{**INDEX, "index_amplitude": 0.0}, {**INDEX, "index_amplitude": -1.0}],
)
def equal_scores(run: Run) -> None:
    """Of equal scores the lower positions are picked. Scores may be negative, and none is left out for that."""
    prove(run, chosen(run, mixed).friendly())


@check(Kind.ATTENTION, "attention.index.long", Level.NUMERICS, needs=NEEDS, cases=by_pair)
def long(run: Run) -> None:
    """Keys are picked among all of a long text, also where its keys are split."""
    prove(run, chosen(run, ((1, 1500), (1, 3), (1, 700)), index_topk=200).friendly())


@check(Kind.ATTENTION, "attention.index.tree_mask", Level.NUMERICS, needs={**NEEDS, "tree_mask": True})
def tree_mask(run: Run) -> None:
    """Of a tree's nodes only those of a query's path are picked, also where it has fewer keys than are picked."""
    prove(run, one_tree(run, **INDEX).friendly())
    if refusal(run.subject, {**NEEDS, **TREES}) is None:
        for most in (INDEX["index_topk"], 45):
            _share(run, own_trees(run, **{**INDEX, "index_topk": most}))


@check(Kind.ATTENTION, "attention.index.shared", Level.NUMERICS, needs=NEEDS, cases=by_pair)
def shared(run: Run) -> None:
    """A layer with `index_from` attends to what each query picked in that layer, in blocks of the same table."""
    for requests in (decode, mixed, ALIKE):
        _share(run, chosen(run, requests).friendly())


@check(Kind.ATTENTION, "attention.index.hostile", Level.HOSTILE, needs=NEEDS, cases=by_pair)
def hostile(run: Run) -> None:
    """Latents and index keys go to their slots, no other byte changes, and garbage is neither picked nor read."""
    for requests in (decode, mixed):
        prove(run, chosen(run, requests))
        _share(run, chosen(run, requests))


@check(Kind.ATTENTION, "attention.index.steps", Level.STATEFUL, needs=NEEDS, cases=by_pair)
def steps(run: Run) -> None:
    """Picks are those of the step, when a backend serves one batch after another."""
    case = chosen(run, mixed)
    made = _worlds(run, case)
    backend = _build(run, case, made)
    for number, requests in enumerate((mixed, decode, mixed)):
        other: Requests = requests(case.block_size)
        _check(run, backend, _worlds(run, evolve(case, requests=other, seed=number)))


def _share(run: Run, case: AttentionCase) -> None:
    made = _worlds(run, case)
    _check(run, _build(run, case, made), made)


def _worlds(run: Run, case: AttentionCase) -> tuple[IndexedWorld, SharingWorld]:
    seeded, device = evolve(case, seed=(run.seed + case.seed) % (1 << 31)), device_of(run.subject)
    return IndexedWorld(seeded, device), SharingWorld(seeded, device)


def _build(run: Run, case: AttentionCase, made: tuple[IndexedWorld, SharingWorld]) -> Any:
    context = case.context(device_of(run.subject), layers=2)
    return run.subject.build(evolve(context, layers=tuple(world.layer for world in made)))


def _check(run: Run, backend: Any, made: tuple[IndexedWorld, SharingWorld]) -> None:
    plan = backend.plan(made[0].batch)
    for world in made:
        out, _ = world.step(backend, plan, writes_cache(run))
        world.check(out, run=run)
