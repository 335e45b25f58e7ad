"""Attention of a single token, which starts before the kernel in front of it ends, compiled, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer

from slotline.backends.triton.backend import EARLIEST, TritonBackend
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
    assert starts_early(backend, world) or length <= 64


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
