"""The kernel for single query tokens on Hopper, compiled, against the suite's oracle."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve

pytest.importorskip("triton")

from slotline.backends.triton import TritonOptions, decode_hopper
from slotline.backends.triton.backend import TritonBackend
from slotline.kernels.gluon_support import has_hopper_kernels
from slotline.testing.environments.attention import Case, World
from slotline.testing.environments.attention_graphs import CapturedStep, GraphPool, cuda_graph

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_hopper_kernels(torch.cuda.get_device_capability()),
    reason="the kernel is for another GPU or another Triton",
)

LENGTHS = Random(3)
EDGES = tuple((1, length) for length in (33, 1, 16, 17, 64, 65, 300, 63, 1025, 128))
BATCHES = {
    "edges": EDGES,
    "before prompts": (*EDGES, (0, 9), (40, 90), (130, 130)),
    "more work than programs": tuple((1, LENGTHS.randint(1, 250)) for _ in range(200)),
}
CASES: dict[str, dict[str, Any]] = {
    "four to one": {"num_heads": 32, "num_kv_heads": 8},
    "two to one, heads of 64": {"num_heads": 8, "num_kv_heads": 4, "head_size": 64},
    "one to one, float16": {"num_heads": 4, "num_kv_heads": 4, "dtype": torch.float16},
    "seven to one": {"num_heads": 28, "num_kv_heads": 4},
    "eight to one": {"num_heads": 8, "num_kv_heads": 1},
    "blocks of 8": {"num_heads": 8, "num_kv_heads": 2, "block_size": 8},
    "blocks of 48 in blocks of 16": {"num_heads": 8, "num_kv_heads": 2, "manager_blocks": 3},
    "blocks of 128": {"num_heads": 8, "num_kv_heads": 2, "block_size": 128},
    "heads within a block": {"num_heads": 8, "num_kv_heads": 2, "layout": "HND"},
    "blocks one behind the other": {"num_heads": 8, "num_kv_heads": 2, "strided": False},
    "large scores": {"num_heads": 8, "num_kv_heads": 2, "amplitude": 300.0},
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch it for as few requests as there are."""
    monkeypatch.setattr(decode_hopper, "LOADS", ((0.0, float("inf")),))


def made(case: Case) -> TritonBackend:
    return TritonBackend(case.context("cuda"))


def launched(backend: TritonBackend) -> bool:
    """Whether the kernel was; what hands out its work must be ready for the next launch."""
    if (kernel := backend._decodes) is None:
        return False
    assert kernel._counter.item() == 0
    return bool(kernel._launch.launch._launches)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", CASES)
def test_attention_of_single_tokens_is_the_oracles(case: str, batch: str, always: None) -> None:
    world = World(Case(requests=BATCHES[batch], **{"head_size": 128, "dtype": torch.bfloat16, **CASES[case]}), "cuda")
    backend = made(world.case)
    for _ in range(2):  # the second launch is a remembered one
        world.check(*world.run(backend))
    assert launched(backend)


@pytest.mark.parametrize(
    "change",
    [
        {"window": 40},
        {"soft_cap": 20.0},
        {"sinks": True},
        {"head_size": 256},
        {"dtype": torch.float32},
        {"num_heads": 32, "num_kv_heads": 2},
    ],
    ids=str,
)
def test_what_it_does_not_know_is_another_kernels(change: dict[str, Any], always: None) -> None:
    common = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": torch.bfloat16}
    world = World(Case(requests=EDGES, **{**common, **change}), "cuda")
    backend = made(world.case)
    world.check(*world.run(backend))
    assert not launched(backend)


def test_the_kernel_can_be_declined(always: None) -> None:
    world = World(Case(requests=EDGES, num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16), "cuda")
    options = TritonOptions(decodes="common")
    declined = TritonBackend(evolve(world.case.context("cuda"), options=options))
    world.check(*world.run(declined))
    assert declined._decodes is None


def test_requests_that_a_captured_step_is_padded_with_have_rows_of_zeros(always: None) -> None:
    common = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": torch.bfloat16}
    world = World(Case(requests=((1, 33),), padding=2, **common), "cuda")
    world.batch.num_requests = world.batch.num_tokens = world.batch.num_decodes = 3
    world.batch.query_start_loc = torch.arange(4, dtype=torch.int32, device="cuda")
    world.batch.seq_lens = torch.tensor([33, 0, 0], dtype=torch.int32, device="cuda")
    world.batch.block_table = torch.cat([world.block_table, torch.zeros_like(world.block_table).repeat(2, 1)])
    query, key, value = world.new_tokens()
    backend, out = made(world.case), torch.full_like(query, torch.nan)
    plan = backend.plan(world.batch)
    backend.write(world.layer, key, value, world.cache, plan)
    lse = backend.forward(world.layer, query, key, value, world.cache, plan, out)
    assert launched(backend)
    assert (out[1:3] == 0).all()
    assert (lse[:, 1:3] == -torch.inf).all()
    world.check(out[:1], lse[:, :1])


def test_queries_that_cannot_be_copied_are_another_kernels(always: None) -> None:
    world = World(Case(requests=EDGES, num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16), "cuda")
    backend = made(world.case)
    wanted, _ = world.run(backend)
    launches = dict(backend._decodes._launch.launch._launches) if backend._decodes else {}
    query, key, value = world.new_tokens()
    apart = torch.zeros(*query.shape[:2], query.shape[2] + 1, dtype=query.dtype, device="cuda")[..., 1:].copy_(query)
    plan, out = backend.plan(world.batch), torch.empty_like(query)
    backend.forward(world.layer, apart, key, value, world.cache, plan, out)
    torch.testing.assert_close(out[: len(wanted)], wanted, atol=1e-2, rtol=1e-2)
    assert launches
    assert backend._decodes is not None
    assert backend._decodes._launch.launch._launches == launches


def test_a_captured_step_follows_other_lengths_and_fewer_requests(always: None) -> None:
    case = Case(requests=((1, 500),), num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    backend = made(case)
    pool = GraphPool(case, backend, num_blocks=400, longest=1200, device="cuda")
    stage = CapturedStep(pool, 8, 1, mixed=False, record=cuda_graph)
    numbers = [pool.admit() for _ in range(8)]
    for number, length in zip(numbers, (5, 130, 64, 400, 1, 63, 900, 31), strict=True):
        pool.prepare({number: length}).run(backend)
    oracle = TritonBackend(evolve(case.context("cuda"), options=TritonOptions(decodes="common")))
    for chosen in (numbers, numbers[:3], numbers[2:7], numbers):
        step = pool.prepare(dict.fromkeys(chosen, 1))
        out = stage.launch(step)[: step.batch.num_tokens]
        wanted, _ = step.run(oracle)
        torch.testing.assert_close(out.float(), wanted.float(), atol=2e-2, rtol=2e-2)
    assert launched(backend)
