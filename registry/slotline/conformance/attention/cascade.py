"""A prefix that all requests share, read once: the same results as without, for every length and feature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention import World, threads
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    examine,
    layouts,
    need_query,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_shapes import Requests
from slotline.testing.environments.attention_variants import plant, share_prefix
from slotline.testing.subject import Subject

CASCADE = {"cascade": True}
PREFIXES = (1, 2, 7, 40)
"""Lengths of the common prefix, in blocks."""


def decodes(prefix: int, p: int) -> Requests:
    """Return one new token per request: directly after the prefix, and around the edges of later pages."""
    return tuple((1, prefix + own) for own in (1, 2, p, p + 1, 3 * p + 2))


def mixes(prefix: int, p: int) -> Requests:
    """Return decodes, drafts, and chunks that begin directly after the prefix and later."""
    own = ((1, 1), (1, p + 3), (4, 4), (5, 2 * p), (p + 2, p + 2), (p, 3 * p + 1))
    return tuple((query_len, prefix + length) for query_len, length in own)


BATCHES: dict[str, Callable[[int, int], Requests]] = {"decode": decodes, "mixed": mixes}


def by_prefix(subject: Subject) -> Iterable[Case]:
    """Return lengths of the prefix, kinds of batch, and layouts in turn."""
    orders = layouts(subject)
    rows = [(blocks, batch) for blocks in PREFIXES for batch in BATCHES]
    return [
        {"blocks": blocks, "batch": batch, "layout": orders[i % len(orders)]} for i, (blocks, batch) in enumerate(rows)
    ]


def by_feature(subject: Subject) -> Iterable[Case]:
    """Return features that merging the two parts can get wrong: sinks, soft caps, ALiBi, scores in the hundreds."""
    rows: list[dict[str, Any]] = [{"amplitude": 100.0}]
    offers: dict[str, dict[str, Any]] = {
        "sinks": {"sinks": True},
        "alibi": {"alibi": True},
        "soft_cap": {"soft_cap": 5.0, "amplitude": 6.0},
    }
    rows += [fields for name, fields in offers.items() if refusal(subject, {name: True, "cascade": True}) is None]
    return rows


def shared(run: Run, blocks: int, batch: str, **fields: Any) -> World:
    """Return a world whose requests share and announce a prefix of some blocks."""
    if batch != "decode":
        need_query(run.subject, 5)
    case = chosen(run, lambda p: BATCHES[batch](blocks * p, p), **fields)
    made = world(run, case)
    share_prefix(made, blocks * case.block_size, announced=True)
    return made


@check(Kind.ATTENTION, "attention.cascade.method", Level.CONTRACT, needs=CASCADE)
def method(run: Run) -> None:
    """use_cascade answers yes or no, for any batch."""
    backend = build(run, chosen(run, ((1, 40),)))
    if not callable(getattr(backend, "use_cascade", None)):
        raise Failed("cascade is declared and there is no method use_cascade")
    for length, count in ((16, 1), (16, 2), (4096, 64)):
        ones = np.ones(count, np.int64)
        answer = backend.use_cascade(length, ones, ones * (length + 5))
        if not isinstance(answer, bool | np.bool_):
            raise Failed(f"use_cascade gives {answer!r}; it answers True or False")


@check(Kind.ATTENTION, "attention.cascade", Level.NUMERICS, needs=CASCADE, cases=by_prefix)
def cascade(run: Run) -> None:
    """A batch with a common prefix gives the same as without: prefixes of one block to many, decode and mixed."""
    examine(run, shared(run, run["blocks"], run["batch"]))


@check(Kind.ATTENTION, "attention.cascade.features", Level.NUMERICS, needs=CASCADE, cases=by_feature)
def features(run: Run) -> None:
    """The parts are joined by LSE: a sink counts once, a cap and ALiBi hold in both, large scores do not overflow."""
    for batch in BATCHES:
        if batch == "mixed" and refusal(run.subject, {"query_len": 5}) is not None:
            continue
        examine(run, shared(run, 3, batch))


@check(Kind.ATTENTION, "attention.cascade.lse", Level.NUMERICS, needs={**CASCADE, "lse": True}, cases=by_feature)
def lse(run: Run) -> None:
    """The LSE is that of both parts together."""
    made = shared(run, 3, "decode")
    out, found = made.run(build(run, made.case), writes_cache(run))
    if found is None:
        raise Failed("forward returned no LSE, and the descriptor declares one")
    made.check(out, found, run, base=run.subject.capabilities.lse_base)


@check(
    Kind.ATTENTION,
    "attention.cascade.needle",
    Level.NUMERICS,
    needs=CASCADE,
    cases=lambda _: [{"at": place} for place in ("first", "last shared", "first own", "own")],
)
def needle(run: Run) -> None:
    """One key decides the output: the first of all, the prefix's last, the first after it, the query's own."""
    case = chosen(run, lambda p: decodes(4 * p, p))
    made, length = world(run, case), 4 * case.block_size
    for request, (_, total) in enumerate(case.requests):
        place = {"first": 0, "last shared": length - 1, "first own": length, "own": total - 1}[run["at"]]
        plant(made, request if place >= length else 0, place, run["at"])
    if run["at"] in ("first", "last shared"):
        for request in range(1, len(case.requests)):
            made.queries[request][:] = made.queries[0][-1:]
    share_prefix(made, length, announced=True)
    examine(run, made)


@check(Kind.ATTENTION, "attention.cascade.again", Level.STATEFUL, needs=CASCADE)
def again(run: Run) -> None:
    """Steps with longer, shorter and no common prefixes follow each other on one object."""
    first = shared(run, 2, "decode")
    backend = build(run, first.case)
    for blocks in (2, 7, 1, 0, 3):
        case = chosen(run, lambda p, n=blocks: decodes(max(n, 1) * p, p))  # type: ignore[misc]
        made = world(run, case)
        if blocks:
            share_prefix(made, blocks * case.block_size, announced=True)
        examine(run, made, backend)


@check(Kind.ATTENTION, "attention.cascade.padded", Level.HOSTILE, needs=CASCADE)
def padded(run: Run) -> None:
    """Padded requests of a captured batch, of length 0 and null blocks, give finite rows and do not affect others."""
    made = shared(run, 3, "decode")
    add_padded_requests(made)
    examine_padded(run, made)


def add_padded_requests(made: World) -> None:
    """Add a request of length 0 with null blocks for each padded row of a batch of single tokens.

    Raises:
        NotApplicable: if nothing is padded.
    """
    batch, count = made.batch, made.case.padding
    if not count:
        raise NotApplicable("nothing is padded")
    more = batch.query_start_loc_cpu[-1] + np.arange(1, count + 1, dtype=np.int32)
    batch.query_start_loc_cpu = np.concatenate([batch.query_start_loc_cpu, more]).astype(np.int32)
    batch.seq_lens_cpu = np.pad(batch.seq_lens_cpu, (0, count))
    batch.query_start_loc = torch.from_numpy(batch.query_start_loc_cpu.copy()).to(made.device)
    batch.seq_lens = torch.from_numpy(batch.seq_lens_cpu.copy()).to(made.device)
    batch.block_table = torch.nn.functional.pad(batch.block_table, (0, 0, 0, count))


def examine_padded(run: Run, made: World) -> None:
    """Run a batch with the requests of `add_padded_requests`, and compare the rows of the others.

    Raises:
        Failed: if the rows of padded requests are not finite, or the others are wrong.
    """
    case, batch = made.case, made.batch
    tokens = batch.num_tokens
    query, key, value = made.new_tokens()
    query[tokens:], key[tokens:], value[tokens:] = 0, 0, 0
    batch.num_requests, batch.num_tokens = batch.num_requests + case.padding, tokens + case.padding
    batch.num_decodes = batch.num_requests
    shape = (batch.num_tokens, case.num_heads, made.layer.head_size_v)
    out = torch.full(shape, torch.nan, dtype=case.dtype, device=made.device)
    backend = build(run, case)
    with threads(1):
        plan = backend.plan(batch)
        if not writes_cache(run):
            backend.write(made.layer, key, value, made.cache, plan)
        backend.forward(made.layer, query, key, value, made.cache, plan, out, made.sinks)
    if not bool(torch.isfinite(out[tokens:]).all()):
        raise Failed("rows of padded requests are not finite")
    made.check(out[:tokens], run=run)
