"""Attention of a single token, which starts before the kernel in front of it ends, compiled, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer

from slotline.backends.triton import single_tokens
from slotline.backends.triton.backend import EARLIEST, TritonBackend
from slotline.kernels.attention_edges import turned
from slotline.registry.contracts.attention_edges import AttentionEdges, HeadNorm
from slotline.testing.environments.attention import Case, World
from slotline.testing.environments.attention_graphs import cuda_graph

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < EARLIEST,
    reason="kernels start early on Hopper and later GPUs",
)

COMMON: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": torch.bfloat16}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eight key-value heads": {"num_heads": 32, "num_kv_heads": 8},
    "float32": {"dtype": torch.float32},
    "float16, heads of 80": {"dtype": torch.float16, "head_size": 80},
    "heads of 256": {"head_size": 256},
    "a window": {"window": 40},
    "a soft cap": {"soft_cap": 20.0},
    "sinks": {"sinks": True},
    "an eight-bit cache": {"kv_dtype": torch.float8_e4m3fn},
    "eight bits of heads of 40": {"kv_dtype": torch.float8_e4m3fn, "head_size": 40},
    "heads within a block": {"layout": "HND"},
    "blocks of 8": {"block_size": 8},
}


@triton.jit
def copy_late(source, target, n, wait, block: tl.constexpr):
    """Let the kernel behind start, and copy only after so many nanoseconds."""
    gdc_launch_dependents()
    at = tl.program_id(0) * block + tl.arange(0, block)
    found = tl.load(source + at, mask=at < n)
    begin = globaltimer()
    while globaltimer() < begin + wait:
        pass
    tl.store(target + at, found, mask=at < n)


def starts_early(backend: TritonBackend, world: World) -> bool:
    """Whether it does, as it should where there is more than one tile of keys."""
    ((launch,),) = backend.plan(world.batch).launches
    assert launch.early == (world.batch.max_seq_len > launch.shape.tile)
    return launch.early


@pytest.mark.parametrize("length", [1, 64, 65, 700, 5000])
@pytest.mark.parametrize("case", CASES)
def test_attention_of_one_token_is_the_oracles(case: str, length: int) -> None:
    world = World(Case(requests=((1, length),), **{**COMMON, **CASES[case]}), "cuda")
    backend = TritonBackend(world.case.context("cuda"))
    world.check(*world.run(backend))
    assert starts_early(backend, world) or length < 700


def test_what_the_kernel_in_front_writes_at_last_is_what_attention_sees() -> None:
    """The query and a whole cache, of which tiles have been asked for before they were written."""
    world = World(Case(requests=((1, 700),), strided=False, padding=0, **COMMON), "cuda")
    backend = TritonBackend(world.case.context("cuda"))
    expected = world.run(backend)
    assert starts_early(backend, world)
    plan, (query, key, value) = backend.plan(world.batch), world.new_tokens()
    tensors = [query, world.cache.key, world.cache.value]
    assert all(tensor.is_contiguous() for tensor in tensors)
    merged = torch.cat([tensor.flatten() for tensor in tensors])
    late = torch.zeros_like(merged)
    pieces = late.split([tensor.numel() for tensor in tensors])
    seen, keys, values = (piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True))
    cache = type(world.cache)(keys, values)
    out = torch.empty_like(query)

    def step() -> None:
        late.zero_()
        copy_late[(triton.cdiv(late.numel(), 4096),)](merged, late, late.numel(), 20_000, block=4096)
        backend.forward(world.layer, seen, key, value, cache, plan, out)

    step()
    replay = cuda_graph(step)
    for _ in range(50):
        out.zero_()
        replay()
        assert torch.equal(out, expected[0])


# What is at the edges of attention, in the same launch.


def edges_of(query: torch.Tensor) -> AttentionEdges:
    """Return norms, and a rotation of whole heads."""
    size, draw = query.shape[2], torch.Generator("cuda").manual_seed(0)
    numbers = (torch.rand(n, size, generator=draw, device="cuda") for n in (2, len(query)))
    weights, angles = (part.to(query.dtype) for part in numbers)
    query_norm, key_norm = (HeadNorm(weight=weight, eps=1e-5, offset=0.5) for weight in weights)
    return AttentionEdges(
        query_norm=query_norm, key_norm=key_norm, cos=angles.cos(), sin=angles.sin(), rotary_size=size
    )


EDGED: dict[str, dict[str, Any]] = {
    "plain": {},
    "two to one": {"num_heads": 16, "num_kv_heads": 8},
    "seventeen to one": {"num_heads": 34},
    "float16, heads of 80": {"dtype": torch.float16, "head_size": 80, "head_size_v": 48},
    "a window": {"window": 40},
    "a soft cap, sinks": {"soft_cap": 20.0, "sinks": True},
    "alibi": {"alibi": True},
    "heads within a block of 8": {"layout": "HND", "block_size": 8},
}
LENGTHS = {"several": (270, 1, 64, 65, 129, 31), "one long": (5000,), "many": tuple(7 + 13 * i for i in range(40))}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch it for as many requests of as many keys as there are."""
    for name, value in {"MOST_LOAD": 4.0, "FEWEST": 1, "LONGEST": 10_000}.items():
        monkeypatch.setattr(single_tokens, name, value)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("case", EDGED)
def test_edges_in_the_launch_are_those_that_the_model_would_compute(case: str, lengths: str, always: None) -> None:
    """And each replay gives the same bits, whichever program of a request comes last."""
    requests = tuple((1, length) for length in LENGTHS[lengths])
    world = World(Case(requests=requests, **{**COMMON, **EDGED[case]}), "cuda")
    backend, (query, key, value) = TritonBackend(world.case.context("cuda")), world.new_tokens()
    plan, edges, sinks, count = backend.plan(world.batch), edges_of(query), world.sinks, world.batch.num_tokens
    assert plan.takes_edges
    caches = [type(world.cache)(*(part.clone() for part in world.cache)) for _ in range(2)]
    expected, found = (query.new_empty(*query.shape[:2], value.shape[2]) for _ in range(2))
    query_turned, key_turned = turned(query, key, edges)
    backend.write(world.layer, key_turned, value, caches[0], plan)
    expected_lse = backend.forward(world.layer, query_turned, key_turned, value, caches[0], plan, expected, sinks)
    lse = backend.forward(world.layer, query, key, value, caches[1], plan, found, sinks, edges=edges)
    close: Any = {"atol": 3e-2, "rtol": 3e-2, "equal_nan": True}
    torch.testing.assert_close(found[:count], expected[:count], **close)
    torch.testing.assert_close(lse[:, :count], expected_lse[:, :count], **close)
    for part, other in zip(*caches, strict=True):
        torch.testing.assert_close(part, other, **close)
    out = torch.empty_like(found)
    replay = cuda_graph(
        lambda: backend.forward(world.layer, query, key, value, caches[1], plan, out, sinks, edges=edges)
    )
    for _ in range(20):
        out.zero_()
        replay()
        assert torch.equal(out[:count], found[:count])


@pytest.mark.parametrize("requests", [1, 3, 16])
def test_a_new_token_that_is_written_at_last_is_what_attention_sees(requests: int, always: None) -> None:
    """Query, key and value of it; older keys have been fetched by then."""
    world = World(Case(requests=((1, 700),) * requests, strided=False, padding=0, **COMMON), "cuda")
    backend = TritonBackend(world.case.context("cuda"))
    plan, states = backend.plan(world.batch), world.new_tokens()
    assert plan.takes_edges
    edges, out, expected = edges_of(states[0]), torch.empty_like(states[0]), torch.empty_like(states[0])
    backend.forward(world.layer, *states, world.cache, plan, expected, edges=edges)
    merged = torch.cat([tensor.flatten() for tensor in states])
    late = torch.zeros_like(merged)
    pieces = late.split([tensor.numel() for tensor in states])
    seen = [piece.view_as(tensor) for piece, tensor in zip(pieces, states, strict=True)]

    def step() -> None:
        late.zero_()
        copy_late[(triton.cdiv(late.numel(), 1024),)](merged, late, late.numel(), 20_000, block=1024)
        backend.forward(world.layer, *seen, world.cache, plan, out, edges=edges)

    step()
    replay = cuda_graph(step)
    for _ in range(50):
        out.zero_()
        replay()
        assert torch.equal(out, expected)
