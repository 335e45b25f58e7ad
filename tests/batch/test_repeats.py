"""Steps that repeat the one before: what the device makes of what it holds is what a gather would have sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from arena import Arena
from attrs import evolve
from devices import tables_on_a_device
from engine_driver import add, random_prompts, run_all, tokens_of
from tiny_engines import DEFAULTS

from slotline.builder import engine_builder as build
from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM, SamplingParams
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.sampling_metadata import PackedParameters
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.device.cpu_ops import CpuOps
from slotline.core.device.transfer_buffer import CpuTransferBuffer
from slotline.core.kv_cache.block_table import HostTables
from slotline.core.model_runner.input_preparer import InputPreparer
from tests.engine.test_engine_equality import pool_of

pytest.importorskip("triton", reason="the device goes on by a kernel of Triton's")
from slotline.backends.cuda.triton_ops import TritonOps

pytestmark = pytest.mark.usefixtures("one_thread")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on a CPU runs the kernel interpreted")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
SMALL: dict[str, Any] = {"block_size": 4, "scheduler.max_batched_tokens": 24}
ON: dict[str, Any] = {"scheduler.async": True, "observability.check_integrity": True}
GREEDY = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.8, seed=7, max_tokens=50, ignore_eos=True)


class Watched:
    """An engine on a CPU that stages as on a GPU; each repeated step is compared with one that is gathered."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.repeated, self.gathered = llm, 0, 0
        engine = llm.engine
        repeated = engine.extension("repeated_steps").path
        assert repeated is not None
        plain = engine.gatherer
        sizes, last_tokens = plain.kernel_block_sizes, engine.runner.last_tokens
        host = HostTables(plain.groups, sizes)
        other = InputPreparer(
            plain.rows, plain.groups, sizes, CpuTransferBuffer(), host, 64, 0, last_tokens,
            extensions=evolve(engine.extensions, gather_shortcut=()),
        )  # fmt: skip
        original = repeated.next

        def watched(schedule: SchedulerOutput, *rest: Any) -> ModelInputs | None:
            inputs = original(schedule, *rest)
            self.gathered += inputs is None
            if inputs is not None:
                self.repeated += 1
                assert_equal(inputs, other.gather(schedule))
            return inputs

        repeated.next = watched  # type: ignore[method-assign]


def assert_equal(found: ModelInputs, expected: ModelInputs) -> None:
    """All that a forward pass and the draws behind it read of a step of single tokens."""
    for name in ("rows", "num_scheduled", "logits_indices_cpu", "logits_rows", "query_start_loc_cpu", "seq_lens_cpu"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    for name in ("num_tokens", "num_padded_tokens", "shape", "spec_positions"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.extras.keys() == expected.extras.keys()
    for name in found.extras.keys() - {"states"}:
        assert found.extras[name] == expected.extras[name], name
    for name in ("input_ids", "positions", "logits_indices", "query_start_loc", "stand_ins"):
        assert getattr(found, name).equal(getattr(expected, name)), name
    assert np.array_equal(found.sampling.positions, expected.sampling.positions)
    assert (found.sampling_params is None) == (expected.sampling_params is None)
    if found.sampling_params is not None and expected.sampling_params is not None:
        assert found.sampling_params.equal(expected.sampling_params)
        uniform = PackedParameters(found.sampling_params).uniform
        assert uniform.equal(PackedParameters(expected.sampling_params).uniform)
    for batch, other in zip(found.batches, expected.batches, strict=True):
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "positions"):
            assert getattr(batch, name).equal(getattr(other, name)), name
        for name in ("num_requests", "num_tokens", "max_query_len", "max_seq_len", "num_decodes", "common_prefix_len"):
            assert getattr(batch, name) == getattr(other, name), name
        assert np.array_equal(batch.seq_lens_cpu, other.seq_lens_cpu)
    if "states" in expected.extras:
        for name in ("slots", "has_initial_state", "num_accepted", "query_start_loc"):
            assert getattr(found.extras["states"], name).equal(getattr(expected.extras["states"], name)), name


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> Callable[..., Watched]:
    """Builds such an engine."""

    def make(family: str, **settings: Any) -> Watched:
        monkeypatch.setattr(build, "transfer_buffer_for", Arena)
        monkeypatch.setattr(build, "tables_for", tables_on_a_device)
        monkeypatch.setattr(CpuOps, "advance_decode_batch", TritonOps.advance_decode_batch)
        llm = LLM(tiny(family), **{**DEFAULTS, **SMALL, **ON, **settings})
        monkeypatch.undo()
        return Watched(llm)

    return make


@pytest.mark.spread(3)
@interpreted
@pytest.mark.behaviour(20, 22, 30)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "gemma2", "bamba"])
def test_a_repeated_step_has_the_inputs_that_a_gather_would_send(
    family: str, params: SamplingParams, tiny: Tiny, watched: Callable[..., Watched], engines: Engines
) -> None:
    prompts = random_prompts([3, 33, 17, 40, 1, 25])
    one = watched(family)
    assert tokens_of(one.llm, prompts, params) == tokens_of(engines(tiny(family), **SMALL), prompts, params)
    assert one.repeated > 2 * one.gathered


@interpreted
@pytest.mark.behaviour(16, 33)
def test_requests_that_come_go_and_are_preempted_end_a_run_of_repeated_steps(
    tiny: Tiny, watched: Callable[..., Watched], engines: Engines
) -> None:
    rng, one = Random(5), watched("llama", memory=pool_of(40, 4), **{"scheduler.max_requests": 5})
    prompts = random_prompts([rng.randrange(1, 40) for _ in range(30)], seed=9)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=rng.randrange(1, 40)) for i in range(30)]
    expected = [o.outputs[0].token_ids for o in engines(tiny("llama"), **SMALL).generate(prompts, params)]
    given, aborted, engine = {}, set(), one.llm.engine
    for index in range(30):
        given[index] = add(one.llm, str(index), prompts[index], params[index])
        for _ in range(rng.randrange(12)):
            engine.step()
        if rng.random() < 0.2 and engine.requests:
            name = rng.choice(list(engine.requests))
            engine.abort(name)
            aborted.add(int(name))
    run_all(one.llm)
    preemptions = sum(request.metrics.num_preemptions for request in given.values())
    assert one.repeated > 50
    assert one.gathered > 50
    assert preemptions > 0
    for index, request in given.items():
        tokens = list(request.output_token_ids)
        assert tokens == expected[index][: len(tokens)]
        assert len(tokens) == len(expected[index]) or index in aborted


@interpreted
def test_a_made_up_step_in_between_is_not_gone_on_from(watched: Callable[..., Watched]) -> None:
    one = watched("llama")
    add(one.llm, "a", random_prompts([9])[0])
    for _ in range(4):
        one.llm.engine.step()
    before, gatherer = one.repeated, one.llm.engine.gatherer
    assert before > 0
    made_up_inputs(gatherer, [2, 3])
    one.llm.engine.step()
    assert one.repeated == before
    one.llm.engine.step()
    assert one.repeated == before + 1
    run_all(one.llm)


@interpreted
def test_a_copy_of_an_unchanged_batch_is_gone_on_from(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = watched("llama")
    schedule = one.llm.engine.scheduler.schedule

    def copied() -> SchedulerOutput:
        step = schedule()
        return evolve(step, rows=step.rows.copy(), num_scheduled=step.num_scheduled.copy())

    monkeypatch.setattr(one.llm.engine.scheduler, "schedule", copied)
    add(one.llm, "a", random_prompts([9])[0])
    for _ in range(6):
        one.llm.engine.step()
    assert one.repeated > 2
    run_all(one.llm)


def test_only_a_device_of_its_own_memory_goes_on_by_itself(tiny: Tiny, engines: Engines) -> None:
    assert engines(tiny("llama"), **SMALL, **ON).engine.extension("repeated_steps").path is None


def test_tables_wider_than_a_program_copies_at_a_time_arrive_whole() -> None:
    from slotline.backends.cuda.triton_repeats import BLOCK, advance_decode_batch

    width, block_size, device = 2 * BLOCK + 7, 4, "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator().manual_seed(0)
    table = torch.randint(1, 999, (5, width), dtype=torch.int32, generator=rng).to(device)
    rows = torch.tensor([3, 1], device=device)
    taken = table[torch.tensor([3, 1, 0], device=device)].contiguous()
    sent = torch.zeros(width + 9, dtype=torch.int32, pin_memory=device == "cuda")
    values = sent[9 : 9 + width - 2].copy_(torch.randint(1, 999, (width - 2,), dtype=torch.int32, generator=rng))
    sent[7], sent[8] = 0, -1  # the first request's table changed, the second's did not
    positions = torch.tensor([(width - 3) * block_size - 1, 6], device=device)
    seq_lens = torch.tensor([5, 7], dtype=torch.int32, device=device)
    counters = torch.zeros(2, 4, dtype=torch.int64, device=device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    expected, others = table.clone(), taken[2].clone()
    expected[3, : width - 2] = values
    tensors = (positions, seq_lens, counters, sent, rows, table, taken, slots)
    advance_decode_batch((2,), *tensors, 7, width - 2, width, block_size, True, False, BLOCK, num_warps=1)
    assert table.equal(expected)
    assert taken[:2].equal(expected[rows])
    assert taken[2].equal(others)
    assert seq_lens.tolist() == [6, 8]
    assert not counters.any()
    assert slots.tolist() == [int(values[width - 3]) * block_size, int(table[1, 1]) * block_size + 3]
