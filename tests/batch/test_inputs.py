"""What a step's inputs hold: positions, slots, tables and the tokens that are scored."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from arena import Arena
from core_cases import Bench, cache_of
from engine_driver import GREEDY, add, random_prompts, recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from slotline.builder.made_up import even_split, made_up_inputs, mixed_split
from slotline.core import LLM
from slotline.core.batch.extensions import Extensions
from slotline.core.batch.graph_dispatcher import GraphDispatcher, GraphShape
from slotline.core.batch.input_batch_cpu import PAD_SLOT
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.padding import padded_size
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.device.transfer_buffer import CpuTransferBuffer
from slotline.core.kv_cache.block_table import DeviceTables, HostTables
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.plugins.states.batches import StateBatches
from slotline.proposers.speculation.rejections import drafted
from slotline.registry.contracts import AttentionBatch
from slotline.registry.negotiation import capture_sizes

pytestmark = pytest.mark.usefixtures("one_thread")


def gatherer_of(bench: Bench, max_tokens: int = 64) -> InputPreparer:
    sizes = [group.block_size // group.ratio for group in bench.cache.groups]
    tables = HostTables(bench.cache.groups, sizes)
    return InputPreparer(bench.rows, bench.cache.groups, sizes, CpuTransferBuffer(), tables, max_tokens)


def batch_of(inputs: ModelInputs) -> AttentionBatch:
    (batch,) = inputs.batches
    return batch


def schedule_of(rows: RequestTable, entries: list[tuple[int, int]]) -> SchedulerOutput:
    """A step of (row, scheduled tokens)."""
    which = np.array([row for row, _ in entries], np.int64)
    counts = np.array([count for _, count in entries], np.int64)
    return SchedulerOutput(
        rows=which,
        num_scheduled=counts,
        num_computed=rows.num_computed_tokens[which],
        num_tokens=int(counts.sum()),
        num_decodes=int((counts == 1).sum()),
    )


@pytest.mark.behaviour(50, 52, 57)
def test_two_five_and_three_tokens_give_the_worked_example() -> None:
    inputs = made_up_inputs(gatherer_of(Bench()), [2, 5, 3])
    batch = batch_of(inputs)
    assert batch.query_start_loc.tolist() == [0, 2, 7, 10]
    assert batch.query_start_loc_cpu.tolist() == [0, 2, 7, 10]
    assert inputs.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert inputs.logits_indices.tolist() == [1, 6, 9]
    assert (batch.num_requests, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (3, 10, 5, 5)


@pytest.mark.behaviour(48, 52, 53, 58, 62)
def test_tokens_and_positions_continue_where_each_request_stands() -> None:
    bench = Bench(max_batched_tokens=8)
    a, b = bench.add("a", [10, 11, 12], max_tokens=9), bench.add("b", [20 + i for i in range(9)], max_tokens=9)
    bench.step()  # a whole, b's first five
    schedule = bench.scheduler.schedule()
    inputs = gatherer_of(bench).gather(schedule)
    assert bench.names(schedule) == ["a", "b"]
    assert inputs.input_ids.tolist() == [7, 25, 26, 27, 28]  # a's sampled token, then the rest of b's prompt
    assert inputs.positions.tolist() == [3, 5, 6, 7, 8]
    assert batch_of(inputs).seq_lens.tolist() == [4, 9]
    assert inputs.logits_indices.tolist() == [0, 4]
    assert inputs.logits_rows.tolist() == [a.row, b.row]


@pytest.mark.behaviour(61)
def test_a_request_in_the_middle_of_its_prompt_is_not_scored() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.add("a", 3, max_tokens=9)
    bench.add("b", 9, max_tokens=9)
    inputs = gatherer_of(bench).gather(bench.scheduler.schedule())
    assert inputs.num_scheduled.tolist() == [3, 5]
    assert inputs.logits_indices.tolist() == [2]
    assert inputs.logits_rows.tolist() == [0]


@pytest.mark.behaviour(61)
def test_a_partial_prefill_samples_nothing_in_a_real_step(
    tiny: Callable[..., Path], engines: Callable[..., LLM]
) -> None:
    llm = engines(tiny("llama"), **{"scheduler.max_batched_tokens": 24})
    (prompt,) = random_prompts([40], seed=3)
    request = add(llm, "long", prompt)
    assert llm.engine.step().rows.tolist() == []
    assert llm.engine.rows.num_tokens[request.row] == 40
    assert llm.engine.step().rows.tolist() == [request.row]
    assert llm.engine.rows.num_tokens[request.row] == 41
    llm.engine.abort("long")


@pytest.mark.behaviour(56, 87)
def test_padding_writes_nowhere_and_leaves_the_batch_as_it_is() -> None:
    bench = Bench()
    bench.add("a", 3)
    gatherer, schedule = gatherer_of(bench), bench.scheduler.schedule()
    plain, padded = gatherer.gather(schedule), gatherer.gather(schedule, GraphShape(8, 0))
    assert (padded.num_tokens, padded.num_padded_tokens) == (3, 8)
    assert padded.input_ids.shape == padded.positions.shape == (8,)
    slots = batch_of(padded).slot_mapping
    assert slots.tolist() == batch_of(plain).slot_mapping.tolist() + [PAD_SLOT] * 5
    assert (PAD_SLOT, batch_of(padded).num_tokens) == (-1, 3)
    assert batch_of(padded).query_start_loc.tolist() == [0, 3]
    assert padded.logits_indices.tolist() == plain.logits_indices.tolist()
    assert torch.equal(padded.input_ids[:3], plain.input_ids)


PHASES = {"decode": "full", "verify": "full", "mixed": "piecewise"}


@pytest.mark.behaviour(27, 59, 87)
@pytest.mark.parametrize(
    ("query_lens", "shape"),
    [
        ([1, 1, 1], (4, 1)),
        ([3, 3], (6, 3)),
        ([3] * 3, (9, 3)),
        ([5], (6, 0)),
        ([2, 1], (4, 0)),
        ([3, 3, 2], (8, 0)),
        ([4, 5], None),
    ],
)
def test_a_step_is_padded_to_whole_requests_where_all_queries_are_equally_long(
    query_lens: list[int], shape: tuple[int, int] | None
) -> None:
    shapes = GraphDispatcher(PHASES, (1, 4, 6, 8, 12), query_len=3, max_requests=4, max_tokens=8)
    found = shapes.shape_for(schedule_of(RequestTable(4, 16), list(enumerate(query_lens))))
    assert found == (None if shape is None else GraphShape(*shape))
    eager = GraphDispatcher({**PHASES, "mixed": "none"}, (1, 4, 8), query_len=3, max_requests=4, max_tokens=8)
    assert eager.shape_for(schedule_of(RequestTable(4, 16), [(0, 2), (1, 1)])) is None


@pytest.mark.behaviour(21)
def test_sizes_that_nobody_names_are_fine_enough_that_padding_costs_little() -> None:
    phases = {"decode": "full", "mixed": "piecewise"}
    shapes = GraphDispatcher(phases, "auto", query_len=1, max_requests=256, max_tokens=8192).largest_first
    decode, mixed = (sorted(s.num_tokens for s in shapes if s.query_len == length) for length in (1, 0))
    assert (decode[:4], decode[-1]) == ([1, 2, 4, 8], 256)
    assert all(after - before <= max(8, 0.125 * before) for before, after in pairwise(decode))
    assert (len(mixed), mixed[0], mixed[-1]) == (11, 4, 512), "few: each is a graph for every layer"
    assert all(after <= 2 * before for before, after in pairwise(mixed))


@pytest.mark.behaviour(21)
def test_shapes_are_captured_from_the_largest_down() -> None:
    shapes = GraphDispatcher(PHASES, (1, 8, 4), query_len=3, max_requests=4, max_tokens=8).largest_first
    assert [shape.num_tokens for shape in shapes] == sorted((shape.num_tokens for shape in shapes), reverse=True)
    assert {shape.num_tokens for shape in shapes if shape.query_len == 3} == {3, 6, 9}
    assert {shape.num_tokens for shape in shapes if shape.query_len == 1} == {1, 4}


@pytest.mark.behaviour(56, 87)
def test_whole_requests_are_padded_with_requests_that_have_no_keys() -> None:
    bench = Bench()
    for name in "abc":
        bench.add(name, 3)
    bench.step()
    gatherer, schedule = gatherer_of(bench), bench.scheduler.schedule()
    plain, padded = gatherer.gather(schedule), gatherer.gather(schedule, GraphShape(8, 1))
    batch = batch_of(padded)
    assert (padded.num_tokens, padded.num_padded_tokens, batch.num_requests, batch.num_tokens) == (3, 8, 8, 8)
    assert batch.query_start_loc.tolist() == list(range(9))
    assert batch.seq_lens.tolist() == [*batch_of(plain).seq_lens.tolist(), 0, 0, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [*batch_of(plain).slot_mapping.tolist(), *[PAD_SLOT] * 5]
    assert batch.block_table.shape[0] == batch.num_decodes == 8
    assert not batch.block_table[3:].any()
    assert (padded.logits_rows.tolist(), padded.logits_indices.tolist()) == ([0, 1, 2], [0, 1, 2])


@pytest.mark.behaviour(56, 87, 149)
def test_a_mixed_batch_with_captured_attention_is_padded_with_requests_without_query_tokens() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.add("a", 3, max_tokens=9)
    bench.step()
    bench.add("b", 4, max_tokens=9)
    gatherer, schedule = gatherer_of(bench), bench.scheduler.schedule()
    shapes = GraphDispatcher(
        {"decode": "full", "mixed": "full"}, (1, 8), query_len=1, max_requests=4, max_tokens=8, mixed_attention=True
    )
    shape = shapes.shape_for(schedule)
    assert shape == GraphShape(8, 0, 4)
    plain, padded = gatherer.gather(schedule), gatherer.gather(schedule, shape)
    batch = batch_of(padded)
    assert (padded.num_tokens, padded.num_padded_tokens, batch.num_requests, batch.num_tokens) == (5, 8, 4, 5)
    assert batch.query_start_loc.tolist() == batch.query_start_loc_cpu.tolist() == [0, 1, 5, 5, 5]
    assert batch.seq_lens.tolist() == [*batch_of(plain).seq_lens.tolist(), 0, 0]
    assert batch.slot_mapping.tolist() == [*batch_of(plain).slot_mapping.tolist(), *[PAD_SLOT] * 3]
    assert (batch.block_table.shape[0], batch.num_decodes, batch.max_query_len) == (4, 1, 4)
    assert not batch.block_table[2:].any()
    assert padded.logits_indices.tolist() == plain.logits_indices.tolist()


@pytest.mark.behaviour(149)
def test_the_made_up_batch_of_a_captured_mixed_shape_has_requests_without_query_tokens() -> None:
    gatherer = gatherer_of(Bench())
    inputs = made_up_inputs(gatherer, [6], seq_len=16, shape=GraphShape(6, 0, 3))
    batch = batch_of(inputs)
    assert batch.query_start_loc.tolist() == [0, 6, 6, 6]
    assert (batch.num_requests, batch.num_tokens, batch.num_decodes, batch.max_seq_len) == (3, 6, 0, 16)
    assert batch.slot_mapping.tolist() == [PAD_SLOT] * 6
    assert batch.block_table.shape[0] == 3


@pytest.mark.behaviour(46)
def test_the_number_of_single_token_requests_at_the_front_is_told() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.add("a", 3, max_tokens=9)
    bench.add("b", 9, max_tokens=9)
    bench.step()
    assert batch_of(gatherer_of(bench).gather(bench.scheduler.schedule())).num_decodes == 1
    assert batch_of(made_up_inputs(gatherer_of(bench), [1, 1, 4])).num_decodes == 2
    assert batch_of(made_up_inputs(gatherer_of(bench), [4, 1])).num_decodes == 0


@pytest.mark.behaviour(63)
def test_drafts_of_three_none_two_none_and_one_give_the_worked_example() -> None:
    rows, counts, drafts = RequestTable(5, 128), [4, 100, 3, 100, 2], [3, 0, 2, 0, 1]
    cache = cache_of(64, block_size=16, max_requests=5, max_model_len=128)
    rows.token_ids[:] = np.arange(5 * 128).reshape(5, 128)
    for row, (count, guessed) in enumerate(zip(counts, drafts, strict=True)):
        rows.num_tokens[row] = 10 if guessed else count
        rows.num_computed_tokens[row] = rows.num_tokens[row] + guessed - count
        rows.num_spec_tokens[row] = guessed
        assert cache.try_grow(row, int(rows.num_computed_tokens[row]) + count)
    gatherer = InputPreparer(
        rows, cache.groups, [16], CpuTransferBuffer(), HostTables(cache.groups, [16]), max_tokens=256, max_spec_tokens=3
    )
    inputs = gatherer.gather(schedule_of(rows, list(enumerate(counts))))
    assert inputs.logits_indices.tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    assert inputs.spec_positions is not None
    assert inputs.spec_positions.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 0, 0, 1]
    judged = drafted(rows, inputs.logits_rows, inputs.spec_positions).tolist()
    assert [place for place, draft in enumerate(judged) if draft < 0] == [3, 4, 7, 8, 10]  # the bonus tokens'
    assert [draft for draft in judged if draft >= 0] == [10, 11, 12, 2 * 128 + 10, 2 * 128 + 11, 4 * 128 + 10]
    scored = inputs.input_ids[inputs.logits_indices.tolist()]
    assert scored.tolist() == [9, 10, 11, 12, 128 + 99, 256 + 9, 256 + 10, 256 + 11, 384 + 99, 512 + 9, 512 + 10]


@given(data=st.data(), block_size=st.sampled_from([2, 4, 8]), ratio=st.sampled_from([1, 2]))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@pytest.mark.behaviour(24, 48, 52, 53, 56, 57, 58, 62)
def test_everything_equals_a_plain_loop_over_requests_and_tokens(
    data: st.DataObject, block_size: int, ratio: int
) -> None:
    rows = RequestTable(5, 24)
    cache = cache_of(64, block_size=block_size * ratio, kernel_block_size=block_size, max_requests=5, max_model_len=24)
    rows.token_ids[:] = np.arange(5 * 24).reshape(5, 24)
    entries = []
    for row in data.draw(st.permutations(range(5)))[: data.draw(st.integers(1, 5))]:
        known = data.draw(st.integers(1, 24))
        computed = data.draw(st.integers(0, known - 1))
        count = data.draw(st.integers(1, known - computed))
        rows.num_tokens[row], rows.num_computed_tokens[row] = known, computed
        assert cache.try_grow(row, computed + count)
        entries.append((row, count))
    tables = HostTables(cache.groups, [block_size])
    gatherer = InputPreparer(rows, cache.groups, [block_size], CpuTransferBuffer(), tables, 120)
    inputs = gatherer.gather(schedule_of(rows, entries))
    batch, table = batch_of(inputs), cache.groups[0].table
    ids, positions, slots, starts, scored = [], [], [], [0], []
    for row, count in entries:
        first = int(rows.num_computed_tokens[row])
        for position in range(first, first + count):
            ids.append(row * 24 + position)
            positions.append(position)
            slots.append(int(table[row, position // block_size]) * block_size + position % block_size)
        starts.append(len(ids))
        if first + count == rows.num_tokens[row]:
            scored.append((len(ids) - 1, row))
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert len(set(slots)) == len(slots)
    assert min(slots) >= block_size  # never the null block
    assert batch.query_start_loc.tolist() == starts
    assert list(zip(inputs.logits_indices.tolist(), inputs.logits_rows.tolist(), strict=True)) == scored
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist()
    assert batch.seq_lens.tolist() == [int(rows.num_computed_tokens[row]) + count for row, count in entries]
    assert batch.max_seq_len == max(batch.seq_lens.tolist())
    for i, (row, _) in enumerate(entries):
        used = -(-int(batch.seq_lens[i]) // block_size)
        assert batch.block_table[i, :used].tolist() == table[row, :used].tolist()


@pytest.mark.behaviour(56, 57, 58)
def test_the_arrays_have_the_types_of_the_contract() -> None:
    batch = batch_of(made_up_inputs(gatherer_of(Bench()), [2, 1]))
    assert (batch.query_start_loc.dtype, batch.seq_lens.dtype, batch.block_table.dtype) == (torch.int32,) * 3
    assert (batch.slot_mapping.dtype, batch.positions.dtype) == (torch.int64,) * 2
    assert {a.dtype for a in (batch.query_start_loc_cpu, batch.seq_lens_cpu)} == {np.dtype(np.int32)}


def test_what_was_handed_out_is_not_rewritten_by_the_next_step() -> None:
    bench = Bench()
    bench.add("a", 5, max_tokens=9)
    gatherer = gatherer_of(bench)
    schedule = bench.scheduler.schedule()
    inputs = gatherer.gather(schedule)
    kept = [t.clone() for t in (inputs.input_ids, inputs.positions, batch_of(inputs).block_table)]
    bench.rows.token_ids[:] = -1
    bench.rows.num_computed_tokens[:] = 3
    bench.cache.groups[0].table[:] = 9
    made_up_inputs(gatherer, [4, 4])
    for tensor, before in zip((inputs.input_ids, inputs.positions, batch_of(inputs).block_table), kept, strict=True):
        assert torch.equal(tensor, before)


@pytest.mark.behaviour(135, 136)
def test_a_made_up_batch_reads_token_zero_and_writes_nowhere() -> None:
    inputs = made_up_inputs(gatherer_of(Bench(max_model_len=32)), [1, 1, 4], seq_len=9, shape=GraphShape(8, 0))
    batch = batch_of(inputs)
    assert batch.seq_lens.tolist() == [9, 9, 9]
    assert inputs.positions.tolist() == [8, 8, 5, 6, 7, 8, 0, 0]
    assert batch.slot_mapping.tolist() == [PAD_SLOT] * 8
    assert not inputs.input_ids.any()
    assert batch.block_table.shape == (3, 3)
    assert not batch.block_table.any()


@pytest.mark.behaviour(135)
@given(tokens=st.integers(1, 300), requests=st.integers(1, 40))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_the_shapes_of_made_up_batches_sum_to_what_was_asked(tokens: int, requests: int) -> None:
    lens = even_split(tokens, min(requests, tokens))
    assert (sum(lens), len(lens)) == (tokens, min(requests, tokens))
    assert min(lens) >= 1
    assert max(lens) - min(lens) <= 1
    *decodes, prompt = mixed_split(tokens, requests)
    assert sum(decodes) == len(decodes) == min(requests - 1, tokens // 2)
    assert len(decodes) + prompt == tokens
    assert prompt >= tokens / 2


@pytest.mark.behaviour(87)
def test_a_step_is_padded_to_the_next_captured_size_or_not_at_all() -> None:
    assert [padded_size(n, (1, 2, 4, 8)) for n in (1, 2, 3, 5, 8, 9, 100)] == [1, 2, 4, 8, 8, 9, 100]
    assert padded_size(7, ()) == 7


@pytest.mark.behaviour(21)
def test_captured_sizes_rise_and_are_multiples_of_the_query_length() -> None:
    assert capture_sizes((8, 1, 4, 2), uniform_query_len=1, max_requests=4) == (1, 2, 4)
    assert capture_sizes((8, 1, 4, 2), uniform_query_len=3, max_requests=3) == (3, 6, 9)


@pytest.mark.behaviour(24)
def test_offsets_cover_the_longest_of_tokens_requests_and_model() -> None:
    for rows, tokens, length in (
        (RequestTable(3, 9), 2, 9),
        (RequestTable(3, 2), 50, 50),
        (RequestTable(90, 2), 5, 91),
    ):
        arange = InputPreparer(rows, [], [], CpuTransferBuffer(), HostTables([], []), tokens)._arange
        assert (arange.dtype, len(arange)) == (np.dtype(np.int64), length)


@pytest.mark.behaviour(150)
def test_one_order_of_requests_serves_every_backend(tiny: Callable[..., Path], engines: Callable[..., LLM]) -> None:
    """Single tokens first, whatever backend a group has: none can ask for another order, so none can disagree."""
    llm = engines(tiny("gemma3"), backend={"full": "torch", "sliding": "cpu"}, max_num_batched_tokens=16)
    assert {group.backend for group in llm.plan.groups} == {"torch", "cpu"}
    seen: list[ModelInputs] = []
    original = llm.engine.runner.launch
    llm.engine.runner.launch = lambda inputs: (seen.append(inputs), original(inputs))[1]  # type: ignore[method-assign]
    try:
        prompts = random_prompts([3, 40, 5])
        outputs = llm.generate(prompts, GREEDY)
    finally:
        del llm.engine.runner.launch
    mixed = 0
    for inputs in seen:
        (decodes,) = {batch.num_decodes for batch in inputs.batches}
        assert len(inputs.batches) == len(llm.plan.cache_groups)
        assert (inputs.num_scheduled[:decodes] == 1).all()
        assert (inputs.num_scheduled[decodes:] > 1).all()
        mixed += 0 < decodes < len(inputs.rows)
    assert mixed
    alone = engines(tiny("gemma3"), backend="torch").generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.behaviour(45, 46)
def test_batch_order_and_row_order_may_differ_in_a_real_engine(
    tiny: Callable[..., Path], engines: Callable[..., LLM]
) -> None:
    llm = engines(tiny("llama"))
    for name, prompt in zip("abc", random_prompts([5, 6, 7]), strict=True):
        add(llm, name, prompt)
    llm.engine.step()
    llm.engine.abort("a")
    late = add(llm, "late", random_prompts([9], seed=4)[0], GREEDY)
    with recorded(llm) as steps:
        llm.engine.step()
    assert late.row == 0
    assert steps[0].rows.tolist() == [2, 1, 0]  # the longest first
    for name in ("b", "c", "late"):
        llm.engine.abort(name)


@pytest.mark.behaviour(30)
def test_what_graphs_read_has_one_address_in_all_steps_of_a_shape() -> None:
    """Tokens of any mixed batch; states and what attention reads where whole requests are padded too."""
    bench = Bench(max_batched_tokens=64, max_requests=8)
    requests = [bench.add(name, 3 + index, max_tokens=9) for index, name in enumerate("abcdef")]
    bench.step()
    groups, sizes, staging = (
        bench.cache.groups,
        [group.block_size // group.ratio for group in bench.cache.groups],
        Arena(),
    )
    tables = DeviceTables(groups, sizes, staging, "cpu")
    extensions = Extensions.of([("states", "states", StateBatches(bench.rows))])
    gatherer = InputPreparer(bench.rows, groups, sizes, staging, tables, 64, extensions=extensions)
    rows = [request.row for request in requests]

    def addresses(entries: list[tuple[int, int]], shape: GraphShape) -> list[int]:
        groups[0].versions[rows[: len(entries)]] += 1  # so that other tables have changed in each step
        inputs = gatherer.gather(schedule_of(bench.rows, entries), shape)
        batch, states = batch_of(inputs), inputs.extras["states"]
        read = [inputs.input_ids, inputs.positions, batch.slot_mapping]
        if shape.padded_requests:
            read += [batch.query_start_loc, batch.seq_lens, batch.block_table]
            read += [states.slots, states.has_initial_state, states.num_accepted]
        return [tensor.data_ptr() for tensor in read]

    mixed, decode = GraphShape(8, 0), GraphShape(8, 1)
    assert addresses([(rows[0], 1)], mixed) == addresses([(row, 1) for row in rows], mixed)
    assert addresses([(rows[0], 1)], decode) == addresses([(row, 1) for row in rows], decode)
