"""Caches of codes with scales: what is stored, what is read, and the error of rounding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention_case import Case as AttentionCase
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    layouts,
    prove,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_formats import CodedWorld
from slotline.testing.environments.attention_shapes import decode, mixed
from slotline.testing.oracles.cache_formats import MOST, rounding_error, turned
from slotline.testing.subject import Subject

FEATURES = {"window": 20, "soft_cap": 5.0, "sinks": True, "alibi": True}


def by_format(subject: Subject) -> Iterable[Case]:
    """Return each declared format that the suite knows with each dtype, and layouts in turn."""
    offered, pairs = subject.capabilities.cache_formats, subject.capabilities.dtypes
    known = [name for name in MOST if offered.refusal(name) is None]
    found = [
        {"cache_format": name, "dtype": dtype}
        for name in known
        for dtype in ("float32", "bfloat16", "float16")
        if pairs.refusal((dtype, FORMAT_DTYPES[name])) is None
    ]
    if not found:
        raise NotApplicable("no cache format with scales of its own is declared")
    orders = layouts(subject)
    return [{**case, "layout": orders[i % len(orders)]} for i, case in enumerate(found)]


def by_format_and_feature(subject: Subject) -> Iterable[Case]:
    """Return each declared feature of layers with the formats in turn."""
    names = {"window": "sliding_window"}
    cases = list(by_format(subject))
    found = [name for name in FEATURES if refusal(subject, {names.get(name, name): True}) is None]
    if not found:
        raise NotApplicable("no window, soft cap, sinks or ALiBi is declared")
    return [{**cases[i % len(cases)], "feature": name} for i, name in enumerate(found)]


@check(Kind.ATTENTION, "attention.formats", Level.NUMERICS, cases=by_format)
def formats(run: Run) -> None:
    """Vectors are stored as codes and scales, each with its token's and head's own, and read as code * scale."""
    for requests in (decode, mixed):
        prove(run, chosen(run, requests).friendly())


@check(Kind.ATTENTION, "attention.formats.features", Level.NUMERICS, cases=by_format_and_feature)
def formats_with_features(run: Run) -> None:
    """Windows, caps, sinks and biases apply to scores of decoded keys."""
    name = run["feature"]
    prove(run, chosen(run, mixed, **{name: FEATURES[name]}).friendly())


@check(Kind.ATTENTION, "attention.formats.long", Level.NUMERICS, cases=by_format)
def formats_long(run: Run) -> None:
    """Scales count once, also where the keys of a long context are split."""
    prove(run, chosen(run, ((1, 1500), (1, 700), (1, 33))).friendly())


@check(Kind.ATTENTION, "attention.formats.rounding", Level.NUMERICS, cases=by_format)
def rounding(run: Run) -> None:
    """Stored vectors differ from the given ones by half a code at most, small ones beside large ones and zeros too."""
    made = _coded(run, chosen(run, ((1, 1), (20, 20), (7, 30))).friendly())
    query, key, value = made.new_tokens()
    for part in (key, value):
        part.copy_(made.random(*part.shape))
        part[::3, 0] *= 100.0  # one head's outliers beside another head's small vectors
        part[1::3, -1] *= 2.0**-8
        part[4] = 0.0
    out = _step(run, made, query, key, value)
    first = 0
    for request, (query_len, length) in enumerate(made.case.requests):
        for name, dense, new in (("key", made.keys, key), ("value", made.values, value)):
            own = new[first : first + query_len].float().cpu()
            stored = made.stored(request, name)
            rounded, exact = (turned(part, made.case.cache_format) for part in (stored[length - query_len :], own))
            _expect_near(rounded, exact, made.case.cache_format, f"{name} of request {request}")
            dense[request] = stored
        first += query_len
    made.check(out[: made.batch.num_tokens], run=run)


@check(Kind.ATTENTION, "attention.formats.hostile", Level.HOSTILE, cases=by_format)
def formats_hostile(run: Run) -> None:
    """No code and no scale of a slot without a token is read, and none is written."""
    for requests in (decode, mixed):
        prove(run, chosen(run, requests))


@check(Kind.ATTENTION, "attention.formats.reuse", Level.STATEFUL, cases=by_format)
def formats_reuse(run: Run) -> None:
    """A slot that is used again has the new vector's scale, whether that is smaller or larger."""
    case = chosen(run, mixed).friendly()
    made, backend = _coded(run, case), build(run, case)
    query, key, value = made.new_tokens()
    for factor in (16.0, 2.0**-4):
        _step(run, made, query, key * factor, value * factor, backend)
    out = _step(run, made, query, key, value, backend)
    made.check(out[: made.batch.num_tokens], run=run)


def _coded(run: Run, case: AttentionCase) -> CodedWorld:
    made = world(run, case)
    assert isinstance(made, CodedWorld)
    return made


def _step(
    run: Run, made: CodedWorld, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: Any = None
) -> torch.Tensor:
    """Run a step of these tokens and return its output."""
    backend = build(run, made.case) if backend is None else backend
    shape = (len(query), made.case.num_heads, made.layer.head_size_v)
    out = torch.zeros(shape, dtype=query.dtype, device=query.device)
    plan = backend.plan(made.batch)
    if not writes_cache(run):
        backend.write(made.layer, key, value, made.cache, plan)
    backend.forward(made.layer, query, key, value, made.cache, plan, out, made.sinks)
    return out


def _expect_near(stored: torch.Tensor, given: torch.Tensor, cache_format: str, what: str) -> None:
    allowed = rounding_error(given, cache_format)
    off = ((stored - given).abs() - allowed).nan_to_num(torch.inf)
    if bool((off > 0).any()):
        token, head, dim = (int(i) for i in torch.unravel_index(off.argmax(), off.shape))
        raise Failed(
            f"{what}: new token {token}, head {head}, element {dim} is stored as "
            f"{float(stored[token, head, dim]):.6g}, given was {float(given[token, head, dim]):.6g}, allowed error "
            f"{float(allowed[token, head, dim]):.3g}"
        )
