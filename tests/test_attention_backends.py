"""Both built-in attention backends against a float64 oracle, in surroundings that punish a wrong read or write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from attention_cases import Case, World, bits

MODULES = {"torch": "slotline.backends.torch_sdpa", "cpu": "slotline.backends.cpu"}

DECODE = ((1, 33), (1, 1), (0, 9), (1, 16), (0, 0), (1, 17), (1, 300))
SHAPES = {
    "decode": DECODE,
    "one long decode": ((1, 700),),
    "prefill": ((40, 40), (0, 0), (17, 17), (3, 3)),
    "chunk with prefix": ((30, 70), (0, 21), (33, 48), (1, 65)),
    "mixed": ((1, 33), (1, 90), (0, 12), (5, 40), (50, 50), (20, 61)),
    "verify": ((5, 37), (5, 5), (0, 8), (5, 101), (3, 64)),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The oracle's many small operations are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=MODULES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(name: str, case: Case) -> Any:
    """The backend that the descriptor's factory builds for `case`."""
    descriptor = import_module(MODULES[name]).descriptor
    offer = descriptor.capabilities
    pair = (case.context().dtype, case.context().kv_dtype)
    assert offer.dtypes.refusal(pair) is None
    assert offer.head_sizes.refusal(case.head_size) is None
    assert offer.layouts.refusal(case.layout) is None
    module, attribute = descriptor.factory.split(":")
    torch.set_num_threads(2)  # the kernels take their number of threads when they are built: work must be shared
    backend = getattr(import_module(module), attribute)(case.context())
    torch.set_num_threads(1)
    return backend


def check(name: str, case: Case) -> None:
    world = World(case)
    world.check(*world.run(build(name, case)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.behaviour(67)
def test_attention_matches_the_oracle(name: str, shape: str, layout: str, dtype: torch.dtype) -> None:
    check(name, Case(requests=SHAPES[shape], layout=layout, dtype=dtype))


@pytest.mark.parametrize("amplitude", [6.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_scores_do_not_overflow(name: str, dtype: torch.dtype, amplitude: float) -> None:
    check(name, Case(requests=SHAPES["mixed"], dtype=dtype, amplitude=amplitude))


@pytest.mark.parametrize("block_size", [1, 16, 24, 256])
def test_every_kernel_block_size_works(name: str, block_size: int) -> None:
    check(name, Case(requests=SHAPES["mixed"], block_size=block_size))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 1, 96), (3, 3, 7)], ids=lambda value: str(value))
def test_head_counts_and_sizes_that_are_no_power_of_two(name: str, heads: int, kv_heads: int, size: int) -> None:
    case = Case(requests=((1, 20), (4, 40), (20, 33)), num_heads=heads, num_kv_heads=kv_heads, head_size=size)
    check(name, case)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.float16, torch.float16), (torch.float32, torch.bfloat16)], ids=str
)
def test_other_declared_dtype_pairs(name: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(name, Case(requests=SHAPES["mixed"], dtype=dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("shape", ["decode", "mixed", "verify", "prefill"])
@pytest.mark.parametrize(
    "feature",
    [
        {"window": 7},
        {"soft_cap": 5.0},
        {"sinks": True},
        {"head_size_v": 48},
        {"window": 20, "soft_cap": 9.0, "sinks": True},
    ],
    ids=lambda feature: "+".join(feature),
)
def test_features_match_the_oracle(name: str, shape: str, feature: dict[str, Any]) -> None:
    check(name, Case(requests=SHAPES[shape], amplitude=3.0, **feature))


@pytest.mark.parametrize("feature", ["window", "sinks"])
def test_features_in_bfloat16(name: str, feature: str) -> None:
    value = {"window": 9, "sinks": True}[feature]
    check(name, Case(requests=SHAPES["mixed"], dtype=torch.bfloat16, **{feature: value}))


def plant_needle(world: World, request: int, position: int) -> None:
    """A key aligned with every query of the request, and a value unlike all others, at `position`."""
    direction = world.queries[request][0, 0].float()
    world.queries[request][:] = direction
    world.keys[request][position] = direction / direction.norm() * 60
    world.values[request][position] = 40.0
    query_len, length = world.case.requests[request]
    world._store(request, range(length - query_len))


@pytest.mark.parametrize(
    ("query_len", "length", "edge"),
    [
        (query_len, length, edge)
        for query_len in (1, 5, 20)
        for length in (15, 16, 17, 40)
        for edge in (-1, 0, 1)
        if query_len <= length and length - query_len - 16 + 1 + edge >= 0
    ],
)
def test_a_window_of_w_tokens_shows_w_keys(name: str, query_len: int, length: int, edge: int) -> None:
    """A needle at the window's edge of the first query: outside, the last one inside, the next."""
    window = 16
    world = World(Case(requests=((query_len, length), (1, 5)), window=window, block_size=4))
    position = length - query_len - window + 1 + edge
    plant_needle(world, 0, position)
    out, lse = world.run(build(name, world.case))
    world.check(out, lse)
    assert bool(out[0].mean() > 20) == (edge >= 0), "the needle decides the output of the first query if it is seen"


@pytest.mark.parametrize("position", [0, 15, 16, 31, 32, 63, 64, 99])
@pytest.mark.parametrize("query_len", [1, 5, 36])
def test_a_needle_at_a_block_or_tile_edge_is_found(name: str, position: int, query_len: int) -> None:
    world = World(Case(requests=((1, 3), (query_len, 100))))
    plant_needle(world, 1, position)
    out, lse = world.run(build(name, world.case))
    world.check(out, lse)
    assert out[-1].mean() > 20


def test_chunks_give_the_same_as_one_shot(name: str) -> None:
    whole = World(Case(requests=((70, 70),)))
    expected, _ = whole.run(build(name, whole.case))
    parts, begin = [], 0
    for size in (1, 20, 16, 33):
        part = World(Case(requests=((size, begin + size),)))
        part.queries = [whole.queries[0][begin : begin + size]]
        for mine, all_of_them in ((part.keys, whole.keys), (part.values, whole.values)):
            mine[0].copy_(all_of_them[0][: begin + size])
        part._store(0, range(begin))
        parts.append(part.run(build(name, part.case))[0])
        begin += size
    torch.testing.assert_close(torch.cat(parts), expected, rtol=2e-5, atol=2e-6)


def test_one_backend_serves_many_batches(name: str) -> None:
    case = Case(requests=SHAPES["mixed"])
    backend = build(name, case)
    for seed, shape in enumerate([*SHAPES, *reversed(SHAPES)]):
        world = World(Case(requests=SHAPES[shape], seed=seed))
        world.check(*world.run(backend))


def test_one_plan_serves_many_layers(name: str) -> None:
    world = World(Case(requests=SHAPES["mixed"]))
    backend = build(name, world.case)
    first, _ = world.run(backend)
    plan = backend.plan(world.batch)
    query, key, value = world.new_tokens()
    for _ in range(3):
        out = torch.empty_like(first).new_zeros(query.shape[0], *first.shape[1:])
        backend.forward(world.layer, query, key, value, world.cache, plan, out)
        assert torch.equal(out[: first.shape[0]], first)


@pytest.mark.behaviour(56)
def test_slot_minus_one_is_never_written_and_the_others_are(name: str) -> None:
    world = World(Case(requests=((20, 20), (1, 9))))
    backend = build(name, world.case)
    slots = world.batch.slot_mapping
    slots[[0, 7, 20]] = -1
    before = [view.clone() for view in world.cache]
    _, key, value = world.new_tokens()
    backend.write(world.layer, key, value, world.cache, backend.plan(world.batch))
    for view, expected, new in zip(world.cache, before, (key, value), strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // 16, slot % 16] = new[token]
        assert torch.equal(bits(view), bits(expected))


def test_query_and_output_may_be_parts_of_wider_tensors(name: str) -> None:
    world = World(Case(requests=SHAPES["mixed"], padding=0))
    backend = build(name, world.case)
    query, key, value = world.new_tokens()
    heads, kv_heads, size = 6, 2, 80
    fused = torch.cat([t.flatten(1) for t in (query, key, value)], 1)
    parts = fused.split([heads * size, kv_heads * size, kv_heads * size], 1)
    q, k, v = (part.unflatten(1, (-1, size)) for part in parts)
    wide = torch.full((query.shape[0], heads, 2 * size), 7.0)
    plan = backend.plan(world.batch)
    backend.write(world.layer, k, v, world.cache, plan)
    lse = backend.forward(world.layer, q, k, v, world.cache, plan, wide[:, :, :size])
    world.check(wide[:, :, :size], lse)
    assert (wide[:, :, size:] == 7.0).all()


def test_an_empty_batch_is_served(name: str) -> None:
    world = World(Case(requests=((0, 0), (0, 7))))
    out, _ = world.run(build(name, world.case))
    assert out.shape[0] == 0


@pytest.mark.behaviour(68)
def test_an_encoder_sees_all_of_its_own_tokens() -> None:
    check("torch", Case(requests=((5, 5), (0, 0), (40, 40), (1, 1)), causal=False, attention_type="encoder_only"))


@pytest.mark.parametrize("module", [*MODULES.values(), "slotline.plugins.kv_specs.full"])
def test_a_descriptor_is_read_without_torch(module: str) -> None:
    paths = [path for path in sys.path if path]
    code = f"""import sys; sys.path[:0] = {paths!r}
import {module} as m; print(m.descriptor.name, 'torch' in sys.modules, 'numba' in sys.modules)"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[1:] == ["False", "False"]


def test_the_cpu_backend_is_refused_with_a_reason_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.backends.cpu import descriptor
    from slotline.registry.descriptor import DeviceInfo

    assert descriptor.probe(DeviceInfo(type="cpu")) == descriptor.capabilities
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "numba" in descriptor.probe(DeviceInfo(type="cpu"))
