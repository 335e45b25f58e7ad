"""The Triton kernels under the interpreter: right on a CPU, in hostile surroundings. On a GPU the suite runs them.

The interpreter computes in numpy, which has no bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

pytest.importorskip("triton")

from slotline.backends.triton import descriptor
from slotline.backends.triton.backend import TritonBackend
from slotline.backends.triton.build import build
from slotline.conformance.attention import graphs, hostile
from slotline.conformance.attention.prefix_groups import FORMS, requests_of
from slotline.registry.capability import Set
from slotline.registry.descriptor import DeviceInfo
from slotline.testing.check import Run
from slotline.testing.environments.attention import Case, World
from slotline.testing.environments.attention_graphs import call_again
from slotline.testing.environments.attention_variants import share_prefix, share_segments
from slotline.testing.subject import subject_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here")

BATCHES = {
    "decode": ((1, 33), (1, 1), (0, 9), (1, 16), (0, 0), (1, 17), (1, 300)),
    "prefill": ((40, 40), (0, 0), (17, 17), (3, 3)),
    "chunk with prefix": ((30, 70), (0, 21), (33, 48), (1, 65)),
    "mixed": ((1, 33), (1, 90), (0, 12), (5, 40), (50, 50), (20, 61)),
    "verify": ((5, 37), (5, 5), (0, 8), (5, 101), (3, 64)),
    "one long": ((1, 700),),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 17},
    "soft cap": {"soft_cap": 3.0, "amplitude": 6.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "alibi, soft cap, sinks": {"alibi": True, "soft_cap": 4.0, "amplitude": 6.0, "sinks": True, "dtype": torch.float16},
    "all": {"window": 16, "sinks": True, "soft_cap": 20.0},
    "heads first": {"layout": "HND"},
    "float16": {"dtype": torch.float16},
    "other value head": {"num_heads": 8, "num_kv_heads": 1, "head_size": 64, "head_size_v": 48},
    "seven to one": {"num_heads": 7, "num_kv_heads": 1, "head_size": 128, "block_size": 32},
    "large scores": {"amplitude": 300.0},
    "eight-bit cache": {"kv_dtype": torch.float8_e4m3fn},
    "eight-bit cache with scales": {"kv_dtype": torch.float8_e4m3fn, "kv_scales": (0.25, 8.0)},
    "scales, soft cap, sinks": {
        "kv_dtype": torch.float8_e5m2,
        "kv_scales": (2.0, 0.125),
        "soft_cap": 5.0,
        "sinks": True,
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of log2(0), which is minus infinity here
@pytest.mark.spread(45, slow=0)  # each batch with half of the features, each feature with half of the batches
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_kernels_agree_with_the_oracle(batch: str, features: str) -> None:
    world = World(Case(requests=BATCHES[batch], **{"head_size": 40, **FEATURES[features]}))
    world.check(*world.run(TritonBackend(world.case.context())))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "features", [{}, {"alibi": True}, {"window": 100, "sinks": True}, {"soft_cap": 4.0, "head_size": 24}]
)
def test_large_blocks_of_queries_walk_whole_tiles_without_a_mask(
    features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotline.backends.triton.backend.ENOUGH", 0)
    requests = ((150, 400), (90, 90), (3, 70))
    world = World(Case(requests=requests, **{"head_size": 32, "dtype": torch.float16, **features}))
    backend = TritonBackend(world.case.context())
    assert {launch.shape.rows for launches in backend.plan(world.batch).launches for launch in launches} == {256}
    world.check(*world.run(backend))


def test_padded_requests_of_a_captured_batch_give_finite_rows() -> None:
    """Requests with query tokens, a length of 0 and slots -1, as the core pads whole requests."""
    world = World(Case(requests=((1, 33),), padding=2))
    world.batch.num_requests = world.batch.num_tokens = world.batch.num_decodes = 3
    world.batch.query_start_loc = torch.arange(4, dtype=torch.int32)
    world.batch.seq_lens = torch.tensor([33, 0, 0], dtype=torch.int32)
    world.batch.block_table = torch.cat([world.block_table, torch.zeros_like(world.block_table).repeat(2, 1)])
    query, key, value = world.new_tokens()
    out = torch.full_like(query, torch.nan)
    backend = TritonBackend(world.case.context())
    plan = backend.plan(world.batch)
    backend.write(world.layer, key, value, world.cache, plan)
    lse = backend.forward(world.layer, query, key, value, world.cache, plan, out)
    assert torch.isfinite(out).all()
    world.check(out[:1], lse[:, :1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.behaviour(149)
@pytest.mark.parametrize("batch", ["decode", "chunk with prefix", "mixed", "verify"])
def test_a_launch_for_few_long_requests_serves_any_mixed_batch_of_as_many_tokens(batch: str) -> None:
    """The engine captures whole mixed batches on such requests, and replays the launch for others."""
    rows, padding, longest = 12, 6, 512
    world = World(Case(requests=BATCHES[batch], head_size=40, padding=padding))
    real, missing = world.batch.num_tokens, rows - world.batch.num_requests
    captured = evolve(
        world.batch,
        num_requests=rows,
        num_tokens=real + padding,
        num_decodes=0,
        max_query_len=min(real + padding, longest),
        max_seq_len=longest,
        query_start_loc=torch.cat([world.batch.query_start_loc, torch.full((missing,), real, dtype=torch.int32)]),
        seq_lens=torch.cat([world.batch.seq_lens, torch.zeros(missing, dtype=torch.int32)]),
        block_table=torch.cat([world.block_table, torch.zeros(missing, world.block_table.shape[1], dtype=torch.int32)]),
    )
    query, key, value = world.new_tokens()
    assert len(query) == len(captured.slot_mapping) == real + padding
    out = torch.zeros_like(query)
    backend = TritonBackend(world.case.context())
    plan = backend.plan(captured)
    backend.write(world.layer, key, value, world.cache, plan)
    lse = backend.forward(world.layer, query, key, value, world.cache, plan, out)
    assert not out[real:].any()
    world.check(out[:real], lse[:, :real])


CASCADES: dict[str, tuple[tuple[tuple[int, int], ...], int, dict[str, Any]]] = {
    "decode": (((1, 33), (1, 34), (1, 49), (1, 90)), 32, {}),
    "mixed": (((1, 49), (1, 80), (5, 53), (20, 90), (3, 51)), 48, {"sinks": True}),
    "long": (((1, 321), (1, 400)), 320, {"soft_cap": 5.0, "amplitude": 6.0}),
    "heads first, eight bits": (
        ((1, 17), (4, 40), (1, 33)),
        16,
        {"layout": "HND", "kv_dtype": torch.float8_e4m3fn, "kv_scales": (0.5, 4.0)},
    ),
}


@pytest.mark.parametrize("name", CASCADES)
@pytest.mark.behaviour(71)
def test_a_common_prefix_served_apart_gives_the_same(name: str) -> None:
    requests, length, features = CASCADES[name]
    world = World(Case(requests=requests, **{"head_size": 40, **features}))
    share_prefix(world, length, announced=True)
    backend = TritonBackend(world.case.context())
    assert [launch.cascade for launch in backend.plan(world.batch).launches[0]] == ["prefix", "rest"]
    world.check(*world.run(backend))


GROUPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "decode": ("apart", "decode", {}),
    "mixed": ("many", "mixed", {"sinks": True}),
    "levels": ("levels", "decode", {"soft_cap": 5.0, "amplitude": 6.0, "num_heads": 8, "num_kv_heads": 2}),
    "levels, eight bits": (
        "levels",
        "decode",
        {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn, "sinks": True},
    ),
    "levels, mixed": ("levels", "mixed", {"layout": "HND", "kv_dtype": torch.float8_e4m3fn, "kv_scales": (0.5, 4.0)}),
}


@pytest.mark.parametrize("name", GROUPED)
def test_prefixes_of_groups_served_apart_give_the_same(name: str) -> None:
    form, batch, features = GROUPED[name]
    case = Case(requests=requests_of(form, batch, 16), **{"head_size": 40, **features})
    world = World(case)
    share_segments(world, FORMS[form](case.block_size)[1])
    backend = TritonBackend(world.case.context())
    assert [launch.cascade for launch in backend.plan(world.batch).launches[0]] == ["segments", "own"]
    world.check(*world.run(backend))


def test_a_common_prefix_is_served_apart_where_many_tokens_read_a_long_one() -> None:
    backend = TritonBackend(Case(requests=((1, 9),)).context())
    many, two = np.ones(64, np.int64), np.ones(2, np.int64)
    assert backend.use_cascade(4096, many, many * 5000)
    assert not backend.use_cascade(16, many, many * 5000)
    assert not backend.use_cascade(4096, two, two * 5000)
    assert not backend.use_cascade(4096, np.array([4000]), np.array([9000]))


TREE = (-1, 0, 1, -1, 3, 0, 4, 3)
BUSHY = (-1, -1, -1, 0, 2, 4, 4, 1)
TREES: dict[str, tuple[tuple[tuple[tuple[int, int], int], ...], dict[str, Any]]] = {
    "verify": ((((9, 40), 8), ((9, 137), 8), ((7, 49), 6), ((9, 9), 8)), {}),
    "mixed": ((((1, 17), 0), ((9, 300), 8), ((12, 60), 8), ((20, 20), 0), ((5, 5), 4), ((1, 1), 1)), {}),
    "sinks and soft cap": ((((9, 40), 8), ((20, 90), 0), ((9, 70), 8)), {"sinks": True, "soft_cap": 5.0}),
    "eight-bit cache": ((((9, 40), 8), ((7, 70), 6)), {"kv_dtype": torch.float8_e4m3fn, "kv_scales": (0.25, 8.0)}),
    "short window": ((((9, 40), 8), ((1, 30), 0), ((7, 70), 6)), {"window": 3}),
    "alibi": ((((9, 40), 8), ((12, 60), 8), ((5, 5), 4)), {"alibi": True}),
    "alibi and a window": ((((9, 140), 8), ((7, 70), 6)), {"alibi": True, "window": 9}),
    "long window": ((((9, 140), 8), ((1, 30), 0), ((7, 70), 6)), {"window": 40}),
    "own trees": ((((9, 140), 8), ((1, 30), 0), ((3, 70), 6)), {"request_parents": (TREE, TREE, BUSHY), "window": 7}),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", TREES)
def test_nodes_of_a_tree_see_the_known_tokens_and_their_own_path(name: str) -> None:
    both, features = TREES[name]
    requests, num_nodes = zip(*both, strict=True)
    world = World(Case(requests=requests, parents=TREE, num_nodes=num_nodes, **{"head_size": 40, **features}))
    world.check(*world.run(TritonBackend(world.case.context())))


def test_a_tree_behind_a_common_prefix() -> None:
    world = World(
        Case(requests=((9, 60), (1, 49), (12, 90), (7, 70)), head_size=40, parents=TREE, num_nodes=(8, 0, 8, 6))
    )
    share_prefix(world, 48, announced=True)
    world.check(*world.run(TritonBackend(world.case.context())))


@pytest.mark.parametrize(
    ("programs", "tile"), [(1, 64), (2, 128), (3, 128), (4, 64), (5, 128), (6, 128), (7, 64), (8, 64), (9, 128)]
)
def test_single_tokens_take_narrow_tiles_where_their_last_round_is_full(programs: int, tile: int) -> None:
    """As many programs for each multiprocessor, four of which with narrow tiles fit on it."""
    case = Case(requests=((1, 40),) * programs, num_heads=8, num_kv_heads=8)
    backend = TritonBackend(evolve(case.context("cpu"), dtype="bfloat16"))
    assert backend._cores == case.num_kv_heads
    ((launch,),) = backend.plan(World(case).batch).launches
    assert launch.shape.tile == tile


def test_inputs_of_any_strides_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """And results are written there: nothing is copied but what has gaps within a head."""
    copied: list[tuple[int, ...]] = []
    copy = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: (copied.append(tuple(self.shape)), copy(self))[1])
    capabilities = evolve(descriptor.capabilities, devices=Set(("cpu",)), min_compute_capability=None)
    offer = evolve(descriptor, capabilities=capabilities, factory=build, probe=None)
    subject = subject_of(offer, device=DeviceInfo(type="cpu"))
    cases = [case for case in hostile.by_part(subject) if case["shape"] == "chunk" or case["part"] == "query"]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", lambda *_, **__: pytest.fail("results are copied"))
        for case in cases:
            hostile.any_strides(Run(subject, case, seed=3))
    assert len(cases) > 9
    assert copied == []


@pytest.mark.slow
def test_captured_launches_serve_other_groups_and_levels() -> None:
    """What a graph would hold is called again: kernels read the segments of each step from the batch's tensors."""
    capabilities = evolve(descriptor.capabilities, devices=Set(("cpu",)), min_compute_capability=None)
    offer = evolve(descriptor, capabilities=capabilities, factory=TritonBackend, probe=None)
    graphs.replays_of_groups(Run(subject_of(offer, device=DeviceInfo(type="cpu")), {}, seed=3), call_again)
