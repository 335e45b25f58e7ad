"""Scales of an eight-bit cache: applied on write and read, separately for keys and values, by layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from attrs import evolve

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, NotApplicable, Run, check
from slotline.testing.environments.attention import World, threads
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    device_of,
    dtype_pairs,
    examine,
    layouts,
    prove,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_shapes import decode, mixed
from slotline.testing.subject import Subject

SCALES = {"small": (0.125, 0.5), "large": (4.0, 16.0), "apart": (0.0625, 8.0)}
"""Of keys and of values. Powers of two: dividing by them is exact, so what must be stored is known to the bit."""
SCALED = {"kv_scales": True}


def by_pair(subject: Subject) -> Iterable[Case]:
    """Return each declared pair with an eight-bit cache, and layouts in turn."""
    pairs = [pair for pair in dtype_pairs(subject) if getattr(torch, pair[1]).itemsize == 1]
    if not pairs:
        raise NotApplicable("no dtype pair with an eight-bit cache is declared")
    orders = layouts(subject)
    return [
        {"dtype": dtype, "kv_dtype": kv_dtype, "layout": orders[i % len(orders)]}
        for i, (dtype, kv_dtype) in enumerate(pairs)
    ]


def by_pair_and_scale(subject: Subject) -> Iterable[Case]:
    """Return each pair with small scales, large ones, and very different ones."""
    return [{**case, "scales": name} for case in by_pair(subject) for name in SCALES]


@check(Kind.ATTENTION, "attention.scales", Level.NUMERICS, needs=SCALED, cases=by_pair_and_scale)
def scales(run: Run) -> None:
    """Stored values are x / scale, and read values are multiplied by scale, keys and values each by their own."""
    for requests in (decode, mixed):
        prove(run, chosen(run, requests, kv_scales=SCALES[run["scales"]]).friendly())


@check(Kind.ATTENTION, "attention.scales.features", Level.NUMERICS, needs={**SCALED, "soft_cap": True}, cases=by_pair)
def scales_before_cap(run: Run) -> None:
    """The soft cap applies to scores of scaled keys."""
    prove(run, chosen(run, mixed, kv_scales=SCALES["small"], soft_cap=5.0, amplitude=6.0).friendly())


@check(Kind.ATTENTION, "attention.scales.long", Level.NUMERICS, needs=SCALED, cases=by_pair)
def scales_long(run: Run) -> None:
    """Scales count once, also where the keys of a long context are split."""
    prove(run, chosen(run, ((1, 1500), (1, 700)), kv_scales=SCALES["apart"]).friendly())


@check(Kind.ATTENTION, "attention.scales.layers", Level.STATEFUL, needs=SCALED, cases=by_pair)
def scales_by_layer(run: Run) -> None:
    """Each layer of a group has its own scales, found by the layer's index, which need not begin at 0."""
    case = chosen(run, mixed, kv_scales=SCALES["small"])
    context, pairs = case.context(device_of(run.subject), layers=2), (SCALES["large"], SCALES["apart"])
    indices = (3, 8)
    own = {
        index: evolve(case, kv_scales=pair).scale_tensors(context.device)
        for index, pair in zip(indices, pairs, strict=True)
    }
    layers = tuple(case.layer(index) for index in indices)
    backend = run.subject.build(evolve(context, layers=layers, kv_scales=own))
    for layer, pair in zip(layers, pairs, strict=True):
        made = world(run, evolve(case, kv_scales=pair))
        made.layer = layer
        examine(run, made, backend)


@check(Kind.ATTENTION, "attention.scales.late", Level.STATEFUL, needs=SCALED, cases=by_pair)
def scales_set_late(run: Run) -> None:
    """Scales are read where they lie, when they are used: they may be set once a backend is built and has planned."""
    case = chosen(run, mixed, kv_scales=(1.0, 1.0))
    context = case.context(device_of(run.subject))
    backend = run.subject.build(context)
    examine(run, world(run, case), backend)
    made = world(run, evolve(case, kv_scales=SCALES["apart"]))
    with threads(1):
        plan = backend.plan(made.batch)
    for tensor, value in zip(context.kv_scales[0], SCALES["apart"], strict=True):
        tensor.fill_(value)
    out, _ = made.step(backend, plan, writes_cache(run))
    made.check(out, run=run)


def by_pair_with_and_without(subject: Subject) -> Iterable[Case]:
    """Return each pair without scales, and with large ones if scales are declared."""
    plain = list(by_pair(subject))
    return plain if refusal(subject, SCALED) else [*plain, *({**case, "scales": "large"} for case in plain)]


@check(Kind.ATTENTION, "attention.scales.clamped", Level.HOSTILE, cases=by_pair_with_and_without)
def clamped(run: Run) -> None:
    """Values beyond the range of an eight-bit cache are stored as the largest finite value, not as NaN or infinity."""
    made = world(run, chosen(run, ((1, 5), (1, 20)), kv_scales=SCALES.get(run.case.get("scales", ""))))
    dtype, huge = made.case.cache_dtype, torch.finfo(made.case.dtype).max
    most = torch.finfo(dtype).max
    stored = [min(huge / scale, most) for scale in made.case.kv_scales or (1.0, 1.0)]
    for request, (_, length) in enumerate(made.case.requests):
        made.keys[request][length - 1] = torch.tensor(stored[0]).to(dtype)
        made.values[request][length - 1] = torch.tensor(-stored[1]).to(dtype)
    expected = made.written()
    query, key, value = made.new_tokens()
    key[: made.batch.num_tokens], value[: made.batch.num_tokens] = huge, -huge
    _store(run, made, query, key, value)
    if expected is not None:
        made.expect_cache(
            expected, f"keys of {huge:.3g} must be stored as {stored[0]:g}, values of {-huge:.3g} as {-stored[1]:g}"
        )


def _store(run: Run, made: World, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    backend = build(run, made.case)
    plan = backend.plan(made.batch)
    if not writes_cache(run):
        backend.write(made.layer, key, value, made.cache, plan)
        return
    shape = (len(query), made.case.num_heads, made.layer.head_size_v)
    out = torch.zeros(shape, dtype=query.dtype, device=query.device)
    backend.forward(made.layer, query, key, value, made.cache, plan, out, made.sinks)
