"""More of attention: masks against overwhelming scores, a plan that only reads, groups that share nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.attention import World, bits, threads
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    examine,
    need_query,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_shapes import mixed
from slotline.testing.subject import Subject

TEMPTING_SCORE = 20000.0
"""Of a key that must not be seen: more than a finite figure for minus infinity usually takes off."""
QUERY_FACTOR = 64.0
"""On the queries, so that the key that gives this score still fits eight-bit floats."""


def by_mask(subject: Subject) -> Iterable[Case]:
    """Return the causal mask, and the window if one is declared."""
    rows: list[dict[str, Any]] = [{}]
    if refusal(subject, {"sliding_window": True}) is None:
        rows.append({"window": 9})
    return rows


def tempt(made: World, request: int, position: int) -> None:
    """Let the queries of a request have a score of `TEMPTING_SCORE` at one key, and moderate ones elsewhere."""
    size = made.case.head_size
    direction = torch.where(made.random(size) < 0, -1.0, 1.0)
    key = direction * (TEMPTING_SCORE / (QUERY_FACTOR * made.layer.scale * size))
    made.queries[request][:] = (QUERY_FACTOR * direction).to(made.case.dtype)
    made.keys[request][position] = key.to(made.case.dtype).to(made.case.cache_dtype)
    made.notes[request] = f"; the masked key at position {position} has a score of {TEMPTING_SCORE:.0f}"
    made.store(request)


@check(Kind.ATTENTION, "attention.mask.absolute", Level.NUMERICS, cases=by_mask)
def mask_is_absolute(run: Run) -> None:
    """A masked key is not seen however large its score: masking takes away minus infinity, not some 10000."""
    window = run.case.get("window")
    if window is None:
        need_query(run.subject, 3)
    requests = ((3, 20), (3, 3)) if window is None else ((1, 30), (1, window + 1))
    made = world(run, chosen(run, requests).friendly())
    for request, (_, length) in enumerate(made.case.requests):
        tempt(made, request, length - 1 if window is None else length - window - 1)
    examine(run, made)


@check(Kind.ATTENTION, "attention.inputs.plan", Level.HOSTILE)
def plan_only_reads(run: Run) -> None:
    """plan leaves every tensor of the batch as it was: other groups plan with the same ones."""
    made = world(run, chosen(run, mixed))
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "positions")
    before = {name: bits(getattr(made.batch, name)) for name in names}
    backend = build(run, made.case)
    with threads(1):
        backend.plan(made.batch)
    for name, old in before.items():
        if not torch.equal(old, bits(getattr(made.batch, name))):
            raise Failed(f"plan changed the batch's {name}; a batch is read only")


@check(Kind.ATTENTION, "attention.groups.apart", Level.STATEFUL, cases=by_mask)
def groups_are_apart(run: Run) -> None:
    """Two groups of a model, each with its own object, plan before either runs, and do not disturb each other."""
    cases = [chosen(run, ((1, 40), (1, 7)))]
    other = {"window": None} if "window" in run.case else {}
    cases.append(chosen(run, ((1, 9), (1, 35), (1, 20)), **other))
    backends = [build(run, case) for case in cases]
    for step in range(2):
        worlds = [world(run, case, run.seed + step) for case in cases]
        with threads(1):
            plans = [backend.plan(made.batch) for backend, made in zip(backends, worlds, strict=True)]
        for backend, made, plan in zip(backends, worlds, plans, strict=True):
            out, _ = made.step(backend, plan, writes_cache(run))
            made.check(out, run=run)
