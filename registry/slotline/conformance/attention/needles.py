"""Needles: one key decides the output, at each position where a mask or a split can be wrong.

Random values cannot show that one key of many is lost, because its contribution to the output is smaller than the
rounding. A key that is aligned with the query and has a large value makes the fault visible at any context length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.attention_choice import (
    block_sizes,
    chosen,
    dtype_pairs,
    examine,
    longest_query,
    need_query,
    world,
)
from slotline.testing.environments.attention_variants import NEEDLE_STEP, NEEDLE_VALUE, plant
from slotline.testing.subject import Subject

SPLITS = (64, 128, 256, 512, 1024)
"""Keys after which kernels cut a context into tiles or parts."""

MOST_PAIRS = 3


def by_dtype(subject: Subject) -> Iterable[Case]:
    """Return a few declared dtype pairs. Masks and splits do not depend on all of them."""
    pairs = dtype_pairs(subject)[: None if subject.exhaustive else MOST_PAIRS]
    return [{"dtype": dtype, "kv_dtype": kv_dtype} for dtype, kv_dtype in pairs]


def _places(length: int, edges: Sequence[int]) -> list[tuple[int, str]]:
    """Return the first and the last key, and the keys on both sides of each edge."""
    found = {0: "the first key", length - 1: "the last key"}
    for edge in edges:
        for position in (edge - 1, edge):
            if 0 < position < length - 1:
                found[position] = f"{'last key before' if position < edge else 'first key after'} the edge at {edge}"
    return sorted(found.items())


def _haystack(run: Run, query_len: int, length: int, places: Sequence[tuple[int, str]], **fields: Any) -> None:
    """Return a batch of equal requests, each with a needle at another position."""
    made = world(run, chosen(run, ((query_len, length),) * len(places), **fields).friendly())
    for request, (position, note) in enumerate(places):
        plant(made, request, position, note)
    examine(run, made)


@check(Kind.ATTENTION, "attention.needle.pages", Level.NUMERICS, cases=by_dtype, profile="decode")
def page_edges(run: Run) -> None:
    """The first and the last key, and those on both sides of the edge of a page, are seen."""
    size = chosen(run, ((1, 1),)).block_size
    length = 4 * size + 3
    _haystack(run, 1, length, _places(length, [size, 2 * size, 4 * size]), block_size=size)


@check(Kind.ATTENTION, "attention.needle.splits", Level.NUMERICS, cases=by_dtype, profile="decode")
def split_edges(run: Run) -> None:
    """No key is lost where a long context is cut into tiles or parts."""
    _haystack(run, 1, SPLITS[-1] + 7, _places(SPLITS[-1] + 7, SPLITS))


@check(Kind.ATTENTION, "attention.needle.long", Level.NUMERICS, profile="decode", cost=0.5)
def long_context(run: Run) -> None:
    """No key is lost at the ends, in the middle and at the page edges of a context of several thousand tokens."""
    length = 32768 if run.subject.exhaustive else 4500
    _haystack(run, 1, length, _places(length, [2048, 4096, length // 2]), num_kv_heads=1)


@check(Kind.ATTENTION, "attention.needle.diagonal", Level.NUMERICS, cases=by_dtype, profile="prefill")
def diagonal(run: Run) -> None:
    """Of the new tokens each sees those up to itself and no later one, with a prefix and without."""
    need_query(run.subject, 2)
    for query_len, length in ((5, 5), (5, 37), (20, 20), (70, 70), (40, 101), (140, 260)):
        query_len = min(query_len, longest_query(run.subject, {}))
        first = length - query_len
        edges = [first, first + 1, first + query_len // 2, *(edge for edge in (16, 32, 64, 128) if edge < length)]
        places = _places(length, edges)
        middle = [place for place in places if first - 2 <= place[0]][:6] + places[-1:]
        _haystack(run, query_len, length, middle)


def windows(subject: Subject) -> Iterable[Case]:
    """Return a window smaller than a page, of a page, and larger, with each dtype in turn."""
    pairs = dtype_pairs(subject)[:MOST_PAIRS]
    size = block_sizes(subject)[0]
    values = sorted({max(size // 2, 1), size, size + 1, 65})
    rows = max(len(pairs), len(values))
    return [
        {"window": values[i % len(values)], "dtype": pairs[i % len(pairs)][0], "kv_dtype": pairs[i % len(pairs)][1]}
        for i in range(rows)
    ]


@check(
    Kind.ATTENTION,
    "attention.window.needle",
    Level.NUMERICS,
    needs={"sliding_window": True},
    cases=windows,
    profile="window",
)
def window_edges(run: Run) -> None:
    """The first and the last query see the oldest key of their window and do not see the key before it."""
    window = run["window"]
    for query_len, length in ((1, window + 3), (1, 3 * window + 40), (5, window + 12), (40, window + 75)):
        query_len = min(query_len, longest_query(run.subject, {"window": window}))
        places: dict[int, str] = {}
        for query in {length - query_len, length - 1}:
            for position in (query - window, query - window + 1, query - window + 2):
                if 0 <= position < length:
                    places[position] = f"the window of position {query} begins at {query - window + 1}"
        _haystack(run, query_len, length, sorted(places.items()))


@check(Kind.ATTENTION, "attention.needle.visible", Level.NUMERICS)
def visible(run: Run) -> None:
    """A needle that must be seen decides the output of every head: KV heads are not mixed up."""
    made = world(run, chosen(run, ((1, 33), (1, 70))).friendly())
    for request, position in ((0, 3), (1, 64)):
        plant(made, request, position)
    out = examine(run, made).float()
    group = made.case.num_heads // made.case.num_kv_heads
    for head in range(made.case.num_heads):
        expected = NEEDLE_VALUE + NEEDLE_STEP * (head // group)
        if not bool((out[:, head] - expected).abs().max() < 0.5):
            raise Failed(f"head {head} should give about {expected}, it gave {out[:, head].flatten()[:3].tolist()}")
