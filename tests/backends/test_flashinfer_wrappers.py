"""The `flashinfer` backend with FlashInfer's own wrappers on a machine without a GPU.

Where FlashInfer is installed, its Python runs here as it stands: constructors, plans, checks of arguments. What takes
a GPU is replaced: the compiled module by one that computes in torch from what the wrappers hand it, pinned memory by
plain memory. Our own kernels run under Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

pytest.importorskip("flashinfer")
from flashinfer import decode, prefill

from slotline.backends.flashinfer import FlashInferOptions, plans
from slotline.backends.flashinfer import backend as adapter
from slotline.registry.contracts.attention import AttentionBatch
from slotline.testing.environments.attention import Case, World
from slotline.testing.environments.attention_shapes import SHAPES, with_empty_rows
from slotline.testing.environments.attention_variants import share_prefix

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")

CAUSAL = 1
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 17},
    "freed before the window": {"window": 17, "freed_before_window": True},
    "soft cap": {"soft_cap": 5.0, "amplitude": 6.0},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 20, "sinks": True},
    "scale": {"scale": 0.5},
    "heads first": {"layout": "HND"},
    "pages of 48": {"block_size": 48},
    "pages of 1": {"block_size": 1},
}


class Module:
    """Stands in for a compiled module: `plan` remembers the host's arrays, `paged_run` attends over the device's."""

    def __init__(self) -> None:
        self.planned: list[dict[str, Any]] = []

    def plan(self, *arguments: Any) -> int:
        names = ("float", "int", "pinned", "starts", "indptr", "lens", "total", "batch", "heads", "kv_heads", "page")
        self.planned.append(
            dict(zip(names, arguments, strict=False)) | {"graph": arguments[11], "window": arguments[15]}
        )
        return len(self.planned) - 1

    def paged_run(self, *arguments: Any) -> None:
        _, _, plan, query, keys, values, starts, indptr, indices, last, out, lse, mask, _, window, _, *rest = arguments
        soft_cap, scale = rest[6], rest[7]
        planned = self.planned[plan]
        assert planned["window"] == window
        assert torch.equal(planned["starts"], starts), "the schedule was made for other queries"
        assert torch.equal(planned["indptr"], indptr), "the schedule was made for other pages"
        group = query.shape[1] // keys.shape[2]
        for request, length in enumerate(planned["lens"].tolist()):
            first, end = starts[request : request + 2].tolist()
            pages = indices[indptr[request] : indptr[request + 1]].long()
            assert length == (len(pages) - 1) * keys.shape[1] + int(last[request] if len(pages) else keys.shape[1])
            tokens = query[first:end].double().transpose(0, 1)  # [H, q, D]
            k, v = (part[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for part in (keys, values))
            scores = tokens @ k.permute(1, 2, 0) * scale
            scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
            own = torch.arange(length - (end - first), length)[:, None]
            seen = torch.arange(length) <= own if mask == CAUSAL else torch.ones(end - first, length, dtype=torch.bool)
            seen = seen & (torch.arange(length) >= own - window) if window >= 0 else seen
            scores = scores.masked_fill(~seen, -torch.inf)
            lse[first:end] = (torch.logsumexp(scores, 2) / math.log(2.0)).T
            weights = torch.softmax(scores, 2).nan_to_num(0.0)  # rows that see nothing
            out[first:end] = (weights @ v.transpose(0, 1)).transpose(0, 1).to(out.dtype)


class Plain:
    """Host buffers without pinning."""

    def __init__(self, size: int, count: int = 2) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8)

    def take(self) -> torch.Tensor:
        return self.buffer

    def copied(self) -> None:
        pass


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """No GPU: see the top of the file."""
    module, empty = Module(), torch.empty
    for library in (decode, prefill):
        monkeypatch.setattr(library, "get_batch_prefill_module", lambda *arguments: module)
        monkeypatch.setattr(library, "device_support_pdl", lambda device: False)
    monkeypatch.setattr(plans, "Pinned", Plain)
    monkeypatch.setattr(plans, "workspace_bytes", lambda context: 16)
    monkeypatch.setattr(adapter, "_takes_fa3", lambda asked, context: False)
    monkeypatch.setattr(adapter, "compile_kernels", lambda context, kernels: None)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(before)


def case(requests: Any, **changes: Any) -> Case:
    return Case(**({"requests": requests, "head_size": 64, "dtype": torch.float16} | changes))


def backend_for(world: World) -> adapter.FlashInferBackend:
    return adapter.FlashInferBackend(evolve(world.case.context(), max_requests=16, max_model_len=1024))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_wrappers_are_handed_gives_the_oracles_attention(shape: str, features: str) -> None:
    size = FEATURES[features].get("block_size", 16)
    world = World(case(with_empty_rows(SHAPES[shape](size)), **FEATURES[features]))
    out, lse = world.run(backend_for(world))
    world.check(out, lse, base="2")


def test_one_backend_serves_batches_in_turn_and_keeps_one_wrapper_for_each_number_of_decodes(module: Module) -> None:
    shapes = [SHAPES[name](16) for name in ("decode", "mixed", "decode", "prefill", "decode")]
    worlds = [World(case(shape, seed=seed)) for seed, shape in enumerate(shapes)]
    backend = backend_for(worlds[0])
    for world in worlds:
        world.check(*world.run(backend), base="2")
    assert set(backend._planner._by_rows) == {2, 5}
    assert {plan["graph"] for plan in module.planned if plan["batch"] == 5} == {True}
    addresses = {plan["int"].data_ptr() for plan in module.planned if plan["graph"]}
    assert len(addresses) == 1, "captured kernels read the schedule at one address"


PREFIXES: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft cap": {"soft_cap": 5.0, "amplitude": 6.0},
    "sinks": {"sinks": True},
    "large scores": {"amplitude": 100.0},
    "heads first": {"layout": "HND"},
}


@pytest.mark.behaviour(10)
@pytest.mark.parametrize("features", PREFIXES)
@pytest.mark.parametrize("blocks", [1, 7])
@pytest.mark.parametrize(
    "own", [((1, 1), (1, 16), (1, 17)), ((1, 2), (1, 30), (5, 20), (40, 45))], ids=["decode", "mixed"]
)
def test_a_common_prefix_is_computed_once_and_joined(
    own: tuple[tuple[int, int], ...], blocks: int, features: str, module: Module
) -> None:
    requests = tuple((query_len, 16 * blocks + length) for query_len, length in own)
    world = World(case(requests, **PREFIXES[features]))
    share_prefix(world, 16 * blocks, announced=True)
    out, lse = world.run(backend_for(world))
    world.check(out, lse, base="2")
    *rest, prefix = module.planned
    assert prefix["lens"].tolist() == [16 * blocks]
    assert prefix["starts"].tolist() == [0, world.batch.num_tokens]
    assert sorted(length for plan in rest for length in plan["lens"].tolist()) == sorted(length for _, length in own)


def test_steps_with_and_without_a_common_prefix_follow_each_other() -> None:
    backend, wrappers = None, set()
    for seed, blocks in enumerate((2, 0, 5, 1)):
        world = World(case(((1, 16 * 5 + 3), (1, 16 * 5 + 20), (6, 16 * 5 + 9)), seed=seed))
        if blocks:
            share_prefix(world, 16 * blocks, announced=True)
        backend = backend or backend_for(world)
        world.check(*world.run(backend), base="2")
        wrappers.add(len(backend._planner._by_kernel))
    assert wrappers == {2}


def test_a_prefix_of_a_decode_step_is_planned_for_a_graph_again_and_again(module: Module) -> None:
    backend, worlds = None, []
    for requests, blocks in ((3, 7), (5, 2), (3, 1), (5, 6)):
        world = World(case(tuple((1, 16 * blocks + 5 + 9 * index) for index in range(requests))))
        share_prefix(world, 16 * blocks, announced=True)
        backend = backend or backend_for(world)
        world.check(*world.run(backend), base="2")
        worlds.append(world)
    assert set(backend._planner._prefix_by_rows) == {3, 5}
    assert not backend._planner._by_kernel
    prefixes = module.planned[1::2]
    assert [plan["lens"].tolist() for plan in prefixes] == [[112], [32], [16], [96]]
    assert all(
        plan["graph"] and plan["total"] == len(w.batch.seq_lens) for plan, w in zip(prefixes, worlds, strict=True)
    )
    assert len({plan["int"].data_ptr() for plan in prefixes}) == 1, "captured kernels read the schedule at one address"


def test_a_prefix_is_served_apart_where_it_is_long_and_shared_by_many() -> None:
    backend = backend_for(World(case(((1, 40),))))
    for length, requests, expected in ((4096, 16, True), (4080, 16, False), (1024, 64, True), (1008, 256, False)):
        ones = np.ones(requests, np.int64)
        assert backend.use_cascade(length, ones, ones * (length + 5)) is expected


@pytest.mark.parametrize(("asked", "kernels"), [("auto", {"fa2", "fa3"}), ("fa3", {"fa3"}), ("fa2", {"fa2"})])
def test_long_queries_take_the_kernel_of_hopper(asked: str, kernels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_takes_fa3", lambda asked, context: asked != "fa2")
    worlds = [World(case(requests)) for requests in (((200, 200), (90, 300)), ((5, 40), (5, 21)))]
    context = evolve(worlds[0].case.context(), options=FlashInferOptions(prefill=asked), max_model_len=1024)  # type: ignore[arg-type]
    backend = adapter.FlashInferBackend(context)
    for world in worlds:
        world.check(*world.run(backend), base="2")
    assert {kernel for kernel, _ in backend._planner._by_kernel} == kernels


def test_a_replayed_batch_may_have_padded_requests() -> None:
    world = World(case(((1, 33),), padding=2))
    batch = padded(world.batch, 3)
    backend = backend_for(world)
    plan = backend.plan(batch)
    query, key, value = world.new_tokens()
    query.nan_to_num_(0.0)
    out = torch.full_like(query, torch.nan)
    backend.write(world.layer, key, value, world.cache, plan)
    lse = backend.forward(world.layer, query, key, value, world.cache, plan, out)
    assert torch.isfinite(out).all()
    world.check(out[:1], lse[:, :1], base="2")


def padded(batch: AttentionBatch, requests: int) -> AttentionBatch:
    """The batch padded to so many requests of one token and no length."""
    missing = requests - batch.num_requests
    starts, lens = np.arange(requests + 1, dtype=np.int32), np.pad(batch.seq_lens_cpu, (0, missing))
    table = torch.cat([batch.block_table, torch.zeros_like(batch.block_table[:1]).repeat(missing, 1)])
    return evolve(
        batch,
        num_requests=requests,
        num_tokens=requests,
        num_decodes=requests,
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_table=table,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
    )
