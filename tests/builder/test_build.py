"""What is built from a plan: every table of the configuration reaches its part, every layer its group and its cache."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from devices import transfer_buffer_for
from repository import ROOT

from slotline.backends.cuda.copies import PinnedBuffer as CudaTransferBuffer
from slotline.builder.engine_builder import EngineBuilder
from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM, SamplingParams
from slotline.core.batch.request_table import RequestTable
from slotline.core.device.transfer_buffer import CpuTransferBuffer
from slotline.planner.plan import make_plan
from slotline.registry.config import load_config
from slotline.registry.errors import CapacityError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def planned(path: Path, **values: Any) -> Any:
    return make_plan(
        load_config(values={"model": str(path), "dtype": "float32", "attention.backend": "torch", **values})
    )


@pytest.mark.behaviour(1, 7)
def test_one_configuration_reaches_every_part(tiny: Callable[..., Path], engines: Callable[..., LLM]) -> None:
    llm = engines(
        tiny("llama"),
        max_num_seqs=3,
        max_num_batched_tokens=24,
        max_model_len=48,
        block_size=4,
        seed=11,
        **{"sampling.logprobs_mode": "raw_logits", "sampling.max_logprobs": 3, "cache.prefix_caching": False},
    )
    engine = llm.engine
    assert (engine.rows.max_requests, engine.rows.max_model_len) == (3, 48)
    assert engine.scheduler.max_batched_tokens == engine.limits.max_batched_tokens == 24
    assert engine.scheduler.default_seed == 11
    assert [group.block_size for group in engine.scheduler.cache.groups] == [4]
    assert engine.scheduler.cache.prefix_caching is False
    assert engine.limits.max_logprobs == 3
    assert engine.runner.head.normalise_logprobs is False
    assert engine.check is True


@pytest.mark.behaviour(22)
def test_a_device_brings_its_own_staging() -> None:
    assert isinstance(transfer_buffer_for("cpu"), CpuTransferBuffer)
    if torch.cuda.is_available():
        assert isinstance(transfer_buffer_for("cuda:0"), CudaTransferBuffer)


@pytest.mark.behaviour(51)
def test_a_step_starts_its_copies_at_once_and_before_attention_is_planned(
    engines: Callable[..., LLM], tiny: Callable[..., Path]
) -> None:
    engine = engines(tiny("llama")).engine
    events: list[str] = []

    class Recording(CpuTransferBuffer):
        def flush(self) -> None:
            events.append("copy")

        def mark(self) -> None:
            events.append("planned")

    feeds, old = engine.gatherer.assembler.feeds, engine.runner.staging
    engine.runner.staging = Recording()
    engine.gatherer.assembler.feeds = (evolve(feeds[0], staging=engine.runner.staging),)
    try:
        request = engine.add("one", [1, 2, 3], GREEDY)
        engine.step()
        engine.abort(request.request_id)
    finally:
        engine.gatherer.assembler.feeds, engine.runner.staging = feeds, old
    assert events == ["copy", "planned"]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("load", r"the model of \d+ parameters does not fit into memory[\s\S]*offload_gib"),
        ("forward", r"a step of 16 tokens of 4 requests does not fit into memory[\s\S]*max_batched_tokens"),
    ],
)
def test_what_does_not_fit_while_an_engine_is_built_is_a_capacity_error(
    place: str, says: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    owner = "TransformersDecoder" if place == "load" else "DecoderModel"
    monkeypatch.setattr(f"slotline.plugins.model_families.transformers_model.{owner}.{place}", fail)
    with pytest.raises(CapacityError, match=says):
        LLM(tiny("llama"), max_num_batched_tokens=16, max_num_seqs=4, memory="4MiB")


@pytest.mark.behaviour(94, 95, 142)
def test_one_overridable_forward_serves_requests_and_dummy_rows(
    engines: Callable[..., LLM], tiny: Callable[..., Path]
) -> None:
    engine = engines(tiny("llama")).engine
    seen: list[tuple[int, int]] = []
    original = engine.runner.forward

    def forward(inputs: Any, attend: Any, wanted: Any = None) -> torch.Tensor:
        seen.append((inputs.num_tokens, inputs.batches[0].max_seq_len))  # what layers see of the step
        return original(inputs, attend, wanted)

    engine.runner.forward = forward  # type: ignore[method-assign]
    try:
        engine.runner.run(made_up_inputs(engine.gatherer, [1, 1, 5]))
        request = engine.add("one", [4, 5, 6], GREEDY)
        engine.step()
        engine.abort(request.request_id)
    finally:
        engine.runner.forward = original  # type: ignore[method-assign]
    assert seen == [(7, 5), (3, 3)]


@pytest.mark.behaviour(107)
def test_what_a_step_handed_out_does_not_change_with_the_next(
    engines: Callable[..., LLM], tiny: Callable[..., Path]
) -> None:
    engine = engines(tiny("llama")).engine
    for i in range(3):
        engine.add(str(i), [i + 3, 7], GREEDY)
    first = engine.step()
    kept = first.rows.copy(), first.token_ids.copy()
    while engine.has_work:
        engine.step()
    np.testing.assert_array_equal(first.rows, kept[0])
    np.testing.assert_array_equal(first.token_ids, kept[1])


@pytest.mark.behaviour(29, 148, 159, 164)
def test_layers_with_equal_needs_share_a_backend_and_every_layer_has_a_cache(tiny: Callable[..., Path]) -> None:
    builder = EngineBuilder(planned(tiny("gemma3"), **{"scheduler.max_model_len": 64}))
    groups, facts = builder.groups.attention_groups(None), builder.planned.facts
    windows = [{layer.window for layer in group.layers} for group in groups]
    assert all(len(of_group) == 1 for of_group in windows)
    assert len(windows) == len({next(iter(of_group)) for of_group in windows}) == 2
    assert sorted(layer.index for group in groups for layer in group.layers) == [layer.index for layer in facts.layers]
    assert len({id(group.backend) for group in groups}) == len(groups)
    router = builder.groups.router(groups, builder.groups.specs(), num_blocks=3)
    assert len(router.caches()) == len(facts.layers)


@pytest.mark.behaviour(29, 157, 159)
def test_layers_that_read_anothers_keys_have_that_ones_cache(tiny: Callable[..., Path]) -> None:
    builder = EngineBuilder(planned(tiny("gemma3n"), **{"scheduler.max_model_len": 64}))
    router = builder.groups.router(builder.groups.attention_groups(None), builder.groups.specs(), num_blocks=3)
    caches, layers = router.caches(), builder.planned.facts.layers
    owners = {layer.index: layer.shares_kv_with for layer in layers if layer.shares_kv_with is not None}
    assert owners
    for reader, owner in owners.items():
        assert caches[reader].key.data_ptr() == caches[owner].key.data_ptr()
        assert caches[reader].value.data_ptr() == caches[owner].value.data_ptr()
        assert caches[reader].key.numel() > 0


@pytest.mark.behaviour(153, 157)
def test_caches_are_zeroed_sized_by_the_spec_and_shared_where_a_layer_reads_anothers(tiny: Callable[..., Path]) -> None:
    plan = planned(tiny("llama"), **{"scheduler.max_model_len": 64})
    *own, last = plan.facts.layers
    reader = evolve(last, shares_kv_with=0)
    groups = tuple(evolve(g, layers=(*own, reader)) for g in plan.plan.groups)
    cache_groups = tuple(evolve(g, layers=tuple(own)) for g in plan.plan.cache_groups)
    plan = evolve(
        plan,
        facts=evolve(plan.facts, layers=(*own, reader)),
        plan=evolve(plan.plan, groups=groups, cache_groups=cache_groups),
    )
    builder = EngineBuilder(plan)
    specs = builder.groups.specs()
    caches = builder.groups.router(builder.groups.attention_groups(None), specs, num_blocks=5).caches()
    assert caches[-1].key.data_ptr() == caches[0].key.data_ptr()
    assert len({cache.key.data_ptr() for cache in caches}) == len(caches) - 1
    for layer, cache in zip(own, caches, strict=False):
        assert cache.key.nbytes + cache.value.nbytes == 5 * specs[0].page_bytes(layer)
        assert not cache.key.any()
        assert not cache.value.any()


@pytest.mark.behaviour(152, 154)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_layout_decides_strides_and_never_the_shape(layout: str, tiny: Callable[..., Path]) -> None:
    plan = planned(tiny("llama"), **{"attention.layout": layout, "cache.block_size": 8, "scheduler.max_model_len": 64})
    builder = EngineBuilder(plan)
    groups = builder.groups
    cache = groups.router(groups.attention_groups(None), groups.specs(), num_blocks=3).caches()[0]
    layer = plan.facts.layers[0]
    assert cache.key.shape == (3, 8, layer.num_kv_heads, layer.head_size)
    token, head = cache.key.stride(1), cache.key.stride(2)
    assert (token > head) == (layout == "NHD")
    assert cache.key.stride(3) == 1
    tables = [group.table.shape[1] for group in groups.cache_groups(groups.specs(), RequestTable(4, 64))]
    assert tables == [64 // 8]  # rows are made once, for the block size that was negotiated


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
@pytest.mark.parametrize("optimize", [False, True])
def test_the_wanted_tokens_alone_have_the_hidden_states_of_the_whole(
    family: str, optimize: bool, tiny: Callable[..., Path]
) -> None:
    plan = planned(tiny(family), optimize=optimize, **{"scheduler.max_model_len": 64})
    model = EngineBuilder(plan).load_model()
    wanted = torch.tensor([2, 6, 9])
    inputs = torch.arange(3, 13), torch.arange(10)
    with torch.inference_mode():
        whole = model.forward(*inputs, plain_attend)
        narrow = model.forward(*inputs, plain_attend, wanted)
    torch.testing.assert_close(narrow, whole[wanted], atol=1e-5, rtol=1e-5)


def plain_attend(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any = None
) -> torch.Tensor:
    """Plain causal attention, enough to compare a model with itself."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        is_causal=True,
        scale=layer.scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize(("requests", "steps"), [("8", "5"), ("1", "600")])
def test_host_step_benchmark_runs(
    requests: str, steps: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["host_step.py", "--requests", requests, "--steps", steps])
    runpy.run_path(str(ROOT / "benchmarks" / "host_step.py"), run_name="__main__")
    assert "host cost of a step" in capsys.readouterr().out


@pytest.mark.behaviour(134, 136)
def test_profiling_spreads_its_tokens_over_the_vocabulary(
    engines: Callable[..., LLM], tiny: Callable[..., Path]
) -> None:
    """A mixture of experts that meets one token alone would be profiled on one expert alone."""
    gatherer = engines(tiny("mixtral")).engine.gatherer
    spread = made_up_inputs(gatherer, [16, 16], vocab_size=300)
    assert len(spread.input_ids.unique()) > 20
    assert int(spread.input_ids.max()) < 300
    torch.testing.assert_close(spread.input_ids, made_up_inputs(gatherer, [16, 16], vocab_size=300).input_ids)
    assert not made_up_inputs(gatherer, [16, 16]).input_ids.any()
    assert (spread.batches[0].slot_mapping == -1).all()


def test_a_table_of_a_plugin_that_is_not_installed_is_said_in_the_log(
    tiny: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="slotline"):
        LLM(tiny("llama"), max_model_len=32, max_num_seqs=2, memory="1MiB", **{"backend.ghost.strength": 3})
    assert any("ghost" in record.getMessage() for record in caplog.records)
