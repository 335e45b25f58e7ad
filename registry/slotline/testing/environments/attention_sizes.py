"""Attention cases of sizes behind powers of two: shapes of a layer, and batches that are long, wide or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slotline.testing.check import Level, NotApplicable, Run
from slotline.testing.environments.attention import Case, World
from slotline.testing.environments.attention_choice import (
    HEAD_SIZES,
    chosen,
    dtype_pairs,
    examine,
    head_sizes,
    layouts,
    longest_query,
    refusal,
    world,
)
from slotline.testing.environments.attention_shapes import Requests
from slotline.testing.environments.attention_variants import plant
from slotline.testing.sizes import SECONDS, behind, declared, sampled, seconds
from slotline.testing.subject import Subject

MOST_HEADS = 128
"""Query heads of a shape: those of the largest models."""
MOST_GROUP = 16
MOST_KV_HEADS = 16
MOST_HEAD = 384
MOST_BLOCK = 256
USUAL = 6
SHAPES_SHARE = 0.5
"""Part of a level's time that shapes of a layer may take. Batches have the rest."""
TILE = 64


def batch_of_shape(p: int) -> Requests:
    """Return decodes, drafts, a prompt and a chunk, small since their heads are many and wide."""
    return ((1, 37), (1, min(p, 96) + 3), (5, 45), (40, 40), (20, 90))


def batch_of_pages(p: int) -> Requests:
    """Return lengths in the second page and at its end, a full page, and a chunk over a page's end."""
    return ((1, p + 3), (1, 2 * p - 1), (3, max(p, 3)), (40, p + 60))


def shapes(subject: Subject) -> Sequence[Mapping[str, Any]]:
    """Return shapes of a layer: heads, groups, sizes of heads and pages, dtypes and layouts, sampled by pairs.

    Raises:
        NotApplicable: if nothing of it is declared.
    """
    offer = subject.capabilities
    wide = declared(offer.head_sizes, MOST_HEAD, start=64, step=8, more=(120,))
    rare = tuple(size for size in wide if size not in HEAD_SIZES[:USUAL])  # all checks take the usual ones
    axes: dict[str, Sequence[Any]] = {
        "head_size": rare or head_sizes(subject),
        "num_kv_heads": behind(MOST_KV_HEADS, start=8),
        "group": declared(offer.group_sizes, MOST_GROUP, start=8, more=(1, 4, 7)),
        "block_size": [size for size in blocks(subject) if size <= TILE] or blocks(subject)[:2],
        "dtypes": [pair for pair in dtype_pairs(subject) if "float8" not in pair[1]],
        "layout": layouts(subject),
    }
    if empty := [name for name, values in axes.items() if not values]:
        raise NotApplicable(f"no {empty[0].replace('_', ' ')} behind a power of two is declared")
    rows = sampled(
        axes,
        cost=_seconds,
        budget=SECONDS[Level.NUMERICS] * SHAPES_SHARE,
        allowed=lambda row: _is_declared(subject, row),
        whole=subject.exhaustive,
    )
    if not rows:
        raise NotApplicable("no shape of such sizes is declared")
    return [_named(row) for row in rows]


def _named(row: Mapping[str, Any]) -> dict[str, Any]:
    named = dict(row)
    dtype, kv_dtype = named.pop("dtypes")
    return {**named, "dtype": dtype, "kv_dtype": kv_dtype}


def blocks(subject: Subject) -> tuple[int, ...]:
    """Return declared sizes of a page, behind powers of two."""
    offer = subject.capabilities.kernel_block_sizes
    step = offer.multiple_of or 1
    top = max(MOST_BLOCK, step)
    return tuple(
        size
        for size in sorted({*offer.exact, *behind(top, start=16, step=step), 16, 32})
        if offer.refusal(size) is None
    )


def _is_declared(subject: Subject, row: Mapping[str, Any]) -> bool:
    """Return True if the values of some axes can be together."""
    if row.get("num_kv_heads", 1) * row.get("group", 1) > MOST_HEADS:
        return False
    needs = {
        name: row[axis]
        for axis, name in (
            ("head_size", "head_sizes"),
            ("group", "group_sizes"),
            ("block_size", "kernel_block_sizes"),
            ("dtypes", "dtypes"),
            ("layout", "layouts"),
        )
        if axis in row
    }
    return refusal(subject, needs) is None


def _seconds(row: Mapping[str, Any]) -> float:
    """Return the estimated time of a shape."""
    width: int = row["num_kv_heads"] * row["group"] * row["head_size"]
    products = sum(query_len * length for query_len, length in batch_of_shape(row["block_size"]))
    return seconds(2.0 * products * width, shapes=1)


def cut(subject: Subject, sizes: Sequence[int], **fields: Any) -> tuple[int, ...]:
    """Return numbers of query tokens up to the longest that is declared.

    Raises:
        NotApplicable: if none is left.
    """
    most = longest_query(subject, fields)
    kept = tuple(size for size in sizes if size <= most)
    if not kept:
        raise NotApplicable(f"not declared: query len needs {min(sizes)}, offers at most {most}")
    return kept


def friendly(run: Run, requests: Requests | Callable[[int], Requests], **fixed: Any) -> Case:
    """Return a case of the batch in friendly surroundings."""
    return chosen(run, requests, **fixed).friendly()


def needles(run: Run, made: World) -> None:
    """Compare a step with the oracle, and again with keys that decide the output where rounding hides the others.

    In float32 a single lost key shows. In coarser dtypes one key of a thousand does not, so the step runs again with a
    key of each request that decides its output: the last before the query's own, the first of the last tile, and the
    one before that, in turn.
    """
    examine(run, made)
    if made.case.coarse_dtype == torch.float32:
        return
    for request, (query_len, length) in enumerate(made.case.requests):
        last = (length - 1) // TILE * TILE
        place = (length - 1, last, max(last - 1, 0))[request % 3]
        plant(made, request, min(place, length - query_len), "near the end of a tile")
    examine(run, made)


def long_world(run: Run, requests: Requests | Callable[[int], Requests], **fixed: Any) -> World:
    """Return a world of a case in friendly surroundings."""
    return world(run, friendly(run, requests, **fixed))
