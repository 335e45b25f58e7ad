"""The kernel for single query tokens under the interpreter: splits joined inside it, and what is at the edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

pytest.importorskip("triton")

from slotline.backends.triton import single_tokens
from slotline.backends.triton.backend import Plan, TritonBackend
from slotline.backends.triton.single_tokens import SingleTokens
from slotline.kernels.attention_edges import turned
from slotline.registry.contracts.attention_edges import AttentionEdges, HeadNorm
from slotline.testing.environments.attention import Case, World

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here")

REQUESTS = ((1, 200), (1, 1), (1, 64), (1, 65), (1, 129))
COMMON: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 24, "dtype": torch.float16}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"window": 70},
    "a window of the new key": {"window": 1},
    "a soft cap, sinks": {"soft_cap": 20.0, "sinks": True},
    "alibi": {"alibi": True},
    "another size of values": {"head_size_v": 40},
    "heads within a block": {"layout": "HND", "block_size": 8},
    "seventeen to one": {"num_heads": 34},
}


@pytest.fixture(params=[1, 3], ids=["unsplit", "split"])
def splits(request: pytest.FixtureRequest) -> int:
    """Splits of each request at most."""
    number: int = request.param
    return number


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Launch it for as many requests as there are, with tiles of 32 keys."""
    if "splits" in request.fixturenames:
        monkeypatch.setattr(single_tokens, "MOST_LOAD", 4.0)
        monkeypatch.setattr(single_tokens, "TILE", 32)


def planned(backend: TritonBackend, world: World, splits: int) -> Plan:
    """Return the plan of a step, with so many splits."""
    plan: Plan = backend.plan(world.batch)
    assert plan.singles is not None
    return plan._replace(singles=plan.singles._replace(splits=splits))


def edges_of(query: torch.Tensor, *, rotary_size: int, norms: bool = True, whole: bool = True) -> AttentionEdges:
    """Return edges of random numbers for the queries [num_tokens, num_heads, size]."""
    draw, size = torch.Generator().manual_seed(1), query.shape[2]

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=draw).to(query.dtype)

    width = rotary_size if whole else rotary_size // 2
    return AttentionEdges(
        query_norm=HeadNorm(weight=numbers(size), eps=0.3, offset=1.0) if norms else None,
        key_norm=HeadNorm(weight=numbers(size), eps=0.05) if norms else None,
        cos=numbers(len(query), width) if width else None,
        sin=numbers(len(query), width) if width else None,
        rotary_size=rotary_size,
    )


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of log2(0), which is minus infinity here
@pytest.mark.parametrize("case", CASES)
def test_single_tokens_are_the_oracles(case: str, splits: int) -> None:
    world = World(Case(requests=REQUESTS, **{**COMMON, **CASES[case]}))
    backend = TritonBackend(world.case.context())
    plan, states = planned(backend, world, splits), world.new_tokens()
    for _ in range(2):  # what counts the splits is ready for the next launch
        out = states[0].new_empty(*states[0].shape[:2], world.layer.head_size_v)
        lse = backend.forward(world.layer, *states, world.cache, plan, out, world.sinks, edges=AttentionEdges())
        world.check(out, lse)
    assert backend._singles is not None
    assert not backend._singles._counters.any()


@interpreted
@pytest.mark.parametrize(
    "form",
    [{"rotary_size": 24}, {"rotary_size": 10, "whole": False}, {"rotary_size": 8, "norms": False}, {"rotary_size": 0}],
    ids=str,
)
def test_edges_are_those_that_the_model_would_compute(form: dict[str, Any], splits: int) -> None:
    world = World(Case(requests=REQUESTS, sinks=True, **COMMON))
    backend, sinks = TritonBackend(world.case.context()), world.sinks
    plan = planned(backend, world, splits)
    assert plan.takes_edges
    query, key, value = world.new_tokens()
    edges = edges_of(query, **form)
    before = [bits.clone() for bits in world.cache]
    out, found = torch.empty(2, len(query), *query.shape[1:], dtype=query.dtype)
    lse = backend.forward(world.layer, query, key, value, world.cache, plan, found, sinks, edges=edges)
    stored = [part.clone() for part in world.cache]
    for part, old in zip(world.cache, before, strict=True):
        part.copy_(old)
    other_query, other_key = turned(query, key, edges)
    backend.write(world.layer, other_key, value, world.cache, plan)
    expected = backend.forward(world.layer, other_query, other_key, value, world.cache, plan, out, sinks)
    count = world.batch.num_tokens
    torch.testing.assert_close(found[:count], out[:count], atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(lse[:, :count], expected[:, :count], atol=4e-3, rtol=4e-3)
    for part, other in zip(stored, world.cache, strict=True):
        torch.testing.assert_close(part, other, atol=4e-3, rtol=4e-3, equal_nan=True)


@interpreted
def test_a_token_without_a_slot_stores_nothing_and_sees_what_is_stored(splits: int) -> None:
    world = World(Case(requests=((1, 40), (1, 17)), padding=0, **COMMON))
    backend, (query, key, value) = TritonBackend(world.case.context()), world.new_tokens()
    plan, edges = backend.plan(world.batch), edges_of(query, rotary_size=24)
    out, again = torch.empty(2, *query.shape, dtype=query.dtype)
    backend.forward(world.layer, query, key, value, world.cache, plan, out, edges=edges)
    stored = [part.clone() for part in world.cache]
    world.batch.slot_mapping = torch.full_like(world.batch.slot_mapping, -1)
    plan = backend.plan(world.batch)
    backend.forward(world.layer, query, -key, -value, world.cache, plan, again, edges=edges)
    torch.testing.assert_close(again, out, atol=4e-3, rtol=4e-3)
    for part, old in zip(world.cache, stored, strict=True):
        torch.testing.assert_close(part, old, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("requests", "splits_at_most"),
    [
        (((1, 40),) * 2, 2),
        (((1, 40),), None),
        ((*((1, 40),) * 2, (5, 9)), None),
        (((5, 40),) * 2, None),
        (((1, 40),) * 4, None),
    ],
    ids=["two", "one", "before a prompt", "several tokens", "too many"],
)
def test_steps_that_it_takes(requests: tuple[tuple[int, int], ...], splits_at_most: int | None) -> None:
    """Programs for eight multiprocessors. The model computes the edges of all other steps, as the plan tells it."""
    world = World(Case(requests=requests, **COMMON))
    plan = TritonBackend(world.case.context()).plan(world.batch)
    assert plan.takes_edges == (splits_at_most is not None)
    assert splits_at_most == (None if plan.singles is None else plan.singles.splits)


@pytest.mark.parametrize(
    "changes",
    [{"num_heads": 66}, {"kv_dtype": torch.float8_e4m3fn}, {"dtype": torch.float32}, {"head_size": 136}],
    ids=str,
)
def test_layers_that_it_does_not_serve(changes: dict[str, Any]) -> None:
    context = Case(requests=((1, 9),), **COMMON).context()
    assert SingleTokens.serves(context)
    assert not SingleTokens.serves(evolve(context, batch_invariant=True))
    assert not SingleTokens.serves(Case(requests=((1, 9),), **{**COMMON, **changes}).context())
