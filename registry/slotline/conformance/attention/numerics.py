"""Correct values in benign surroundings: batches, shapes, dtypes and scales."""

from __future__ import annotations

from collections.abc import Iterable

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, NotApplicable, Run, check
from slotline.testing.environments.attention import BACKEND_THREADS
from slotline.testing.environments.attention_choice import (
    chosen,
    dtype_pairs,
    examine,
    group_sizes,
    head_sizes,
    layouts,
    need_query,
    prove,
    world,
)
from slotline.testing.environments.attention_shapes import chunk, decode, mixed, prefill, verify
from slotline.testing.environments.attention_variants import repel
from slotline.testing.subject import Subject

DEEP_SCORE = -60000.0
"""Below the -1e4 and -5e4 that stand for minus infinity in many kernels, within the range of float32."""


def by_dtype_and_layout(subject: Subject) -> Iterable[Case]:
    """Return each declared dtype pair and each declared layout. All combinations if exhaustive."""
    pairs = [{"dtype": dtype, "kv_dtype": kv_dtype} for dtype, kv_dtype in dtype_pairs(subject)]
    if not pairs:
        raise NotApplicable("none of the declared dtype pairs is known to this torch")
    orders = layouts(subject)
    if subject.exhaustive:
        return [{**pair, "layout": layout} for pair in pairs for layout in orders]
    rows = range(max(len(pairs), len(orders)))
    return [{**pairs[i % len(pairs)], "layout": orders[i % len(orders)]} for i in rows]


def by_head_size(subject: Subject) -> Iterable[Case]:
    """Return declared head sizes."""
    return [{"head_size": size} for size in head_sizes(subject)]


def by_value_head_size(subject: Subject) -> Iterable[Case]:
    """Return a smaller and a larger value head, of sizes declared for keys if possible."""
    size, *others = head_sizes(subject)
    smaller = max((other for other in others if other < size), default=max(size // 2, 1))
    larger = min((other for other in others if other > size), default=None)
    pairs = [(size, smaller)] + ([(size, larger)] if larger is not None else [])
    return [{"head_size": key, "head_size_v": value} for key, value in pairs if key != value]


def by_heads(subject: Subject) -> Iterable[Case]:
    """Return each declared group with several KV heads, and with one."""
    groups = group_sizes(subject)
    rows = [{"group": group, "num_kv_heads": 2 if group > 1 else 3} for group in groups]
    return [*rows, {"group": max(groups), "num_kv_heads": 1}]


@check(Kind.ATTENTION, "attention.decode", Level.NUMERICS, cases=by_dtype_and_layout, profile="decode")
def decodes(run: Run) -> None:
    """One query token per request, lengths around the edges of pages."""
    prove(run, chosen(run, decode).friendly())


@check(Kind.ATTENTION, "attention.prefill", Level.NUMERICS, cases=by_dtype_and_layout, profile="prefill")
def prefills(run: Run) -> None:
    """Whole prompts: a query sees no key after its own."""
    need_query(run.subject, 2)
    prove(run, chosen(run, prefill).friendly())


@check(Kind.ATTENTION, "attention.chunked_prefill", Level.NUMERICS, cases=by_dtype_and_layout, profile="prefill")
def chunked_prefills(run: Run) -> None:
    """Prompts that go on after a prefix: the queries of a request are its last tokens."""
    need_query(run.subject, 2)
    prove(run, chosen(run, chunk).friendly())


@check(Kind.ATTENTION, "attention.mixed", Level.NUMERICS, cases=by_dtype_and_layout, profile="mixed")
def mixes(run: Run) -> None:
    """Decodes, verification, whole prompts and chunks in one batch."""
    need_query(run.subject, 2)
    prove(run, chosen(run, mixed).friendly())


@check(Kind.ATTENTION, "attention.verify", Level.NUMERICS, cases=by_dtype_and_layout, profile="decode")
def verifies(run: Run) -> None:
    """A few query tokens per request, as when drafts are verified."""
    need_query(run.subject, 2)
    prove(run, chosen(run, verify).friendly())


@check(Kind.ATTENTION, "attention.head_size", Level.NUMERICS, cases=by_head_size)
def head_size(run: Run) -> None:
    """Head sizes, those that are no power of two among them."""
    prove(run, chosen(run, mixed, amplitude=2.0).friendly())


@check(
    Kind.ATTENTION,
    "attention.head_size.value",
    Level.NUMERICS,
    needs={"different_value_head": True},
    cases=by_value_head_size,
)
def value_head_size(run: Run) -> None:
    """A value head may have another size than a key head."""
    prove(run, chosen(run, mixed).friendly())


@check(Kind.ATTENTION, "attention.heads", Level.NUMERICS, cases=by_heads)
def heads(run: Run) -> None:
    """Query head h reads KV head h // group, for each declared group."""
    prove(run, chosen(run, mixed).friendly())


@check(Kind.ATTENTION, "attention.scale", Level.NUMERICS, cases=lambda _: [{"scale": 0.5}, {"scale": 0.02}])
def scale(run: Run) -> None:
    """Scores are scaled by the layer's own factor, not by one over the root of the head size."""
    prove(run, chosen(run, mixed, amplitude=2.0).friendly())


@check(
    Kind.ATTENTION,
    "attention.large_scores",
    Level.NUMERICS,
    cases=lambda subject: [{**case, "amplitude": a} for case in by_dtype_and_layout(subject) for a in (6.0, 300.0)],
)
def large_scores(run: Run) -> None:
    """Scores in the hundreds neither overflow nor lose their order."""
    prove(run, chosen(run, mixed).friendly())


@check(Kind.ATTENTION, "attention.large_scores.negative", Level.NUMERICS)
def large_negative_scores(run: Run) -> None:
    """Keys that a query must not see do not win if all scores that it sees are far below zero.

    Kills masks that use a number like -1e4 instead of minus infinity. If a number is declared (`lowest_score`), scores
    stay a fifth above it.
    """
    made = world(run, chosen(run, lambda p: ((1, p + 3), (5, 2 * p + 1), (p, 2 * p))).friendly())
    lowest = run.subject.capabilities.lowest_score
    score = DEEP_SCORE if lowest is None else max(DEEP_SCORE, 0.8 * lowest * made.layer.scale)
    repel(made, score)
    run.measured["score"] = score
    examine(run, made)


@check(Kind.ATTENTION, "attention.threads", Level.NUMERICS)
def shared_work(run: Run) -> None:
    """Several of torch's threads may share the work of a call."""
    for requests in (lambda p: ((1, 40 * p), (1, 3), (1, 9 * p)), mixed, lambda p: ((8 * p + 5, 9 * p),)):
        prove(run, chosen(run, requests).friendly(), BACKEND_THREADS)
