"""Which single query tokens the kernel for Hopper serves; on a card test_triton_decodes_cuda.py holds what it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

pytest.importorskip("triton")

from slotline.backends.triton.backend import TritonBackend
from slotline.backends.triton.decode_hopper import HopperDecodes
from slotline.testing.environments.attention import Case, World

SERVED: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": torch.bfloat16}
CORES = 132


def served(**changes: Any) -> bool:
    return HopperDecodes.serves(Case(requests=((1, 9),), **{**SERVED, **changes}).context("cpu"))


@pytest.mark.parametrize(
    "changes",
    [{}, {"head_size": 64}, {"dtype": torch.float16}, {"block_size": 8}, {"block_size": 64}, {"num_heads": 16}],
    ids=str,
)
def test_layers_it_serves(changes: dict[str, Any]) -> None:
    assert served(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_size": 96},
        {"head_size_v": 64},
        {"dtype": torch.float32},
        {"num_heads": 32},
        {"window": 100},
        {"soft_cap": 30.0},
        {"sinks": True},
        {"block_size": 4},
        {"block_size": 48},
    ],
    ids=str,
)
def test_layers_it_does_not_serve(changes: dict[str, Any]) -> None:
    assert not served(**changes)


def test_groups_whose_bits_may_not_depend_on_the_batch_are_not_served() -> None:
    context = Case(requests=((1, 9),), **SERVED).context("cpu")
    assert HopperDecodes.serves(context)
    assert not HopperDecodes.serves(evolve(context, batch_invariant=True))
    assert not HopperDecodes.serves(evolve(context, kv_dtype="float8_e4m3fn"))


@pytest.mark.parametrize(("requests", "taken"), [(1, False), (190, False), (192, True), (264, True), (265, False),
                                                 (500, False), (512, True), (4096, True)])  # fmt: skip
def test_it_takes_what_fills_its_places(requests: int, taken: bool) -> None:
    """The card's multiprocessors have four programs each at a time, and two KV heads a request are two programs."""
    assert HopperDecodes(Case(requests=((1, 9),), **SERVED).context("cpu"), CORES).takes(requests) == taken


@pytest.mark.parametrize(
    ("requests", "decodes", "others"),
    [
        (((1, 40),) * 6, 6, 0),
        ((*((1, 40),) * 6, (5, 9), (30, 50)), 6, 1),
        (((1, 40),) * 2, None, 1),
        (((5, 40),) * 6, None, 1),
    ],
)
def test_a_plan_hands_it_the_single_tokens_in_front(
    requests: tuple[tuple[int, int], ...], decodes: int | None, others: int
) -> None:
    world = World(Case(requests=requests, **SERVED))
    context = world.case.context("cpu")
    backend = TritonBackend(context)
    assert backend._decodes is None
    assert backend.plan(world.batch).decodes is None
    backend._decodes = HopperDecodes(context, 3)
    plan = backend.plan(world.batch)
    assert (None if plan.decodes is None else plan.decodes.end) == decodes
    assert len(plan.launches) == others
    assert sum(one.tokens for (one,) in plan.launches) + (decodes or 0) == world.batch.num_tokens


def test_rows_that_cannot_be_copied_are_left_to_the_kernel_for_all() -> None:
    world = World(Case(requests=((1, 40),) * 6, **SERVED))
    context = world.case.context("cpu")
    backend = TritonBackend(context)
    wanted, _ = world.run(backend)
    backend._decodes = HopperDecodes(context, 3)
    query, key, value = world.new_tokens()
    apart = torch.zeros(*query.shape[:2], query.shape[2] + 1, dtype=query.dtype)[..., 1:].copy_(query)
    plan, out = backend.plan(world.batch), torch.empty_like(query)
    backend.write(world.layer, key, value, world.cache, plan)
    backend.forward(world.layer, apart, key, value, world.cache, plan, out)
    assert plan.decodes is not None
    torch.testing.assert_close(out[: len(wanted)], wanted)
