"""How much the last tokens of a request attend to each key, as backends with `scores` tell it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.attention import World, threads
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    dtype_pairs,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_shapes import Requests
from slotline.testing.oracles.attention import probabilities
from slotline.testing.subject import Subject

SCORES = {"scores": True}
TOLERANCE = 2e-4
"""Largest error of a probability. Products are in float32, of keys and queries as they are stored."""
FEATURES: dict[str, dict[str, Any]] = {
    "sliding_window": {"window": 6},
    "soft_cap": {"soft_cap": 4.0, "amplitude": 3.0},
    "sinks": {"sinks": True},
    "different_value_head": {"head_size_v": 32},
}


def windows(p: int) -> Requests:
    """Return last tokens of prompts: one, few, all, and those that lie in two pages."""
    return ((1, 1), (1, 2 * p + 1), (4, 4), (3, p), (5, p + 2), (p + 2, 3 * p))


def by_feature(subject: Subject) -> Iterable[Case]:
    """Return the declared dtype pairs, and each feature that changes probabilities."""
    rows: list[dict[str, Any]] = [{"dtype": dtype, "kv_dtype": kv_dtype} for dtype, kv_dtype in dtype_pairs(subject)]
    rows += [fields for name, fields in FEATURES.items() if refusal(subject, {name: True}) is None]
    return rows


def _asked(run: Run, made: World, backend: Any, request: int) -> torch.Tensor:
    """Ask for the scores of a request's new tokens, and look at the form of the answer and at what was given."""
    case = made.case
    query_len, length = case.requests[request]
    first = sum(q for q, _ in case.requests[:request])
    query = made.new_tokens()[0][first : first + query_len]
    blocks = torch.tensor(made.owned[request], dtype=torch.int64, device=made.device)
    cache, given = made.cache_bits(), query.clone()
    with threads(1):
        found = backend.attention_scores(made.layer, query, made.cache, blocks, length, made.sinks)
    wanted = [length, case.num_kv_heads]
    if not isinstance(found, torch.Tensor) or list(found.shape) != wanted or found.dtype != torch.float32:
        shape = f"{list(found.shape)} {found.dtype}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise Failed(f"attention_scores returned {shape}, expected {wanted} float32")
    made.expect_cache(cache, "attention_scores only reads the cache")
    if not torch.equal(given, query):
        raise Failed("attention_scores changed the query")
    return found


@check(Kind.ATTENTION, "attention.scores", Level.NUMERICS, needs=SCORES, cases=by_feature)
def scores(run: Run) -> None:
    """Scores are the mean probabilities of the last tokens, over queries and the query heads of a KV head."""
    made = world(run, chosen(run, windows, freed_before_window=False))
    case, backend = made.case, build(run, made.case)
    made.run(backend, writes_cache(run))
    for request, (query_len, length) in enumerate(case.requests):
        found = _asked(run, made, backend, request).cpu().double()
        expected = probabilities(
            made.queries[request].to(case.dtype),
            made.dense[request][0],
            scale=made.layer.scale,
            window=made.layer.window,
            soft_cap=made.layer.soft_cap,
            sinks=made.sinks,
        )
        worst = float((found - expected).abs().max())
        if not worst <= TOLERANCE:
            place, head = divmod(int((found - expected).abs().nan_to_num(torch.inf).argmax()), case.num_kv_heads)
            raise Failed(
                f"the last {query_len} of {length} tokens attend to key {place} of KV head {head} with a mean of "
                f"{float(expected[place, head]):.5f}; attention_scores gave {float(found[place, head]):.5f}"
            )
