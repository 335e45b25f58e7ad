"""Backends that approximate: what decides the output is found wherever it is, and bounds of blocks are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from attrs import evolve

from slotline.registry.contracts.cache_tensors import KEY_BOUNDS
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention import World
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    dtype_pairs,
    examine,
    need_query,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_shapes import mixed
from slotline.testing.environments.attention_variants import hide, part_of, plant
from slotline.testing.subject import Subject

NUM_BLOCKS = 200
"""Blocks of the longest haystack, more than a backend that leaves blocks out reads."""


HOW = ("negative", "opposed", "one_head")
"""Ways to hide a needle, see `hide`."""


def by_dtype(subject: Subject) -> Iterable[Case]:
    """Return the declared dtypes of a backend that approximates."""
    if subject.capabilities.exact.support:
        raise NotApplicable("the backend is exact")
    return [{"dtype": dtype, "kv_dtype": kv_dtype} for dtype, kv_dtype in dtype_pairs(subject)]


def by_place(subject: Subject) -> Iterable[Case]:
    """Return ways to hide a needle, with the dtypes in turn."""
    dtypes = list(by_dtype(subject))
    return [{"how": how, **dtypes[i % len(dtypes)]} for i, how in enumerate(("plain", *HOW))]


def by_bounds(subject: Subject) -> Iterable[Case]:
    """Return the declared dtypes of a backend that keeps bounds of keys."""
    if subject.capabilities.cache_formats.refusal(KEY_BOUNDS) is not None:
        raise NotApplicable("the format key_bounds is not declared")
    pairs = dtype_pairs(subject)
    return [{"dtype": dtype, "kv_dtype": kv_dtype, "cache_format": KEY_BOUNDS} for dtype, kv_dtype in pairs]


@check(Kind.ATTENTION, "attention.approximate.needle", Level.NUMERICS, cases=by_place, profile="decode")
def needle(run: Run) -> None:
    """A key that decides the output of a decode is found in any block of a long context.

    Also if only one KV head needs it, where the query is negative, and beside a key that repels the query as much.
    """
    size = chosen(run, ((1, 1),)).block_size
    length = NUM_BLOCKS * size + 1
    _find(run, length, [0, size, size + 1, 77 * size - 1, NUM_BLOCKS * size // 2, NUM_BLOCKS * size - 1, length - 1])


@check(Kind.ATTENTION, "attention.approximate.short", Level.NUMERICS, cases=by_dtype, profile="decode")
def short(run: Run) -> None:
    """The same in contexts of a few blocks, of which the newest holds few keys or is full."""
    size = chosen(run, ((1, 1),)).block_size
    for length in (1, size, size + 1, 3 * size, 3 * size + 1):
        _find(run, length, sorted({0, length // 2, length - 1}))


def _find(run: Run, length: int, places: Sequence[int]) -> None:
    case = evolve(chosen(run, ((1, length),) * len(places)).friendly(), exact=False, seed=run.seed % (1 << 31))
    made = world(run, case)
    for request, position in enumerate(places):
        plant(made, request, position)
        if (how := run.case.get("how")) in HOW:
            hide(made, request, position, how)
    examine(run, made)


@check(Kind.ATTENTION, "attention.bounds.chunks", Level.NUMERICS, cases=by_bounds)
def chunks(run: Run) -> None:
    """Bounds are those of a block's keys so far, however its tokens are divided into steps."""
    size = chosen(run, ((1, 1),)).block_size
    need_query(run.subject, 2 * size + 3)
    for counts in ((2 * size + 3,), (size, size), (1, size, 1), (size, 2, size + 1)):
        made, length = world(run, chosen(run, ((sum(counts), sum(counts)),))), 0
        backend = build(run, made.case)
        for count in counts:
            length += count
            _step(run, made, backend, count, length)
            _expect_bounds(made, length)


@check(Kind.ATTENTION, "attention.bounds.rewritten", Level.STATEFUL, cases=by_bounds)
def rewritten(run: Run) -> None:
    """A slot that is written again, as after rejected drafts, leaves nothing of its old key in the bounds."""
    size = chosen(run, ((1, 1),)).block_size
    need_query(run.subject, 3 * size)
    made = world(run, chosen(run, ((3 * size, 3 * size),)))
    backend = build(run, made.case)
    kept = size + size // 2
    _step(run, made, backend, kept, kept)
    keys, drafts = made.keys[0].clone(), min(size, 5)
    made.keys[0][kept:] = 50 * keys[kept:]  # larger than every other
    _step(run, made, backend, drafts, kept + drafts)
    made.keys[0][:] = keys
    for length in range(kept + 1, kept + drafts + 1):
        _step(run, made, backend, 1, length)
        _expect_bounds(made, length)


@check(Kind.ATTENTION, "attention.bounds.reused", Level.STATEFUL, cases=by_bounds)
def reused(run: Run) -> None:
    """A block that goes to another request has bounds of the new keys alone, the third time too."""
    case = chosen(run, mixed).friendly()
    need_query(run.subject, max(length for _, length in case.requests))
    made = world(run, case)
    backend = build(run, made.case)
    for factor in (32.0, 2.0**-5, 1.0):
        for request, keys in enumerate(made.keys):
            made.keys[request] = keys * factor
            length = len(keys)
            if length:
                _step(run, made, backend, length, length, request)
                _expect_bounds(made, length, request)
            made.keys[request] = keys


def _step(run: Run, made: World, backend: object, count: int, length: int, request: int = 0) -> None:
    """Write the last `count` of the first `length` tokens of a request, as a step of its own."""
    part_of(made, request, count, length).run(backend, writes_cache(run))


def _expect_bounds(made: World, length: int, request: int = 0) -> None:
    size, keys = made.case.block_size, made.keys[request]
    for number in range(-(-length // size)):
        own = keys[number * size : min(length, (number + 1) * size)]
        wanted = torch.stack([own.amin(0), own.amax(0)])
        found = made.cache[KEY_BOUNDS][made.owned[request][number]].cpu()
        if not torch.equal(found, wanted):
            head = int((found != wanted).flatten(2).any(2).any(0).nonzero()[0])
            raise Failed(
                f"block {number} of request {request} with {len(own)} keys: the bounds of KV head {head} begin with "
                f"{found[:, head, :3].tolist()}, wanted {wanted[:, head, :3].tolist()}"
            )
