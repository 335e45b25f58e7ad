"""The graph checks of attention on a CPU, where calling again with the same objects stands in for a replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from slotline.conformance.attention import graphs
from slotline.registry.capability import Flag, GraphSupport, Level
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache
from slotline.registry.descriptor import DeviceInfo
from slotline.testing.check import Failed, Run
from slotline.testing.environments.attention_graphs import call_again
from slotline.testing.mutants.attention.cascade import CascadeAttention
from slotline.testing.mutants.attention.prefix_groups import GroupAttention
from slotline.testing.reference.attention import descriptor as reference
from slotline.testing.reference.attention.backend import EagerAttention, Plan
from slotline.testing.runner import Outcome, check_plugin
from slotline.testing.subject import Subject, subject_of

CPU = DeviceInfo(type="cpu")


class ReadsTensors(EagerAttention):
    """Reads what changes from the batch's tensors when it runs, as captured kernels do."""

    def plan(self, batch: AttentionBatch) -> Any:
        return batch

    def now(self, batch: AttentionBatch) -> Plan:
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        return Plan(starts, lengths, batch.block_table, batch.slot_mapping, batch.causal)

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Any) -> None:
        super().write(layer, key, value, cache, self.now(plan))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        return super().forward(layer, query, key, value, cache, self.now(plan), out, sinks)


class OwnBuffers(ReadsTensors):
    """Copies lengths and tables into buffers of its own, which each plan fills again."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.buffers: dict[tuple[int, int], AttentionBatch] = {}

    def plan(self, batch: AttentionBatch) -> Any:
        shape = (len(batch.slot_mapping), len(batch.seq_lens))
        own = self.buffers.setdefault(shape, self.fresh(batch))
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            getattr(own, name)[: len(getattr(batch, name))].copy_(getattr(batch, name))
        own.block_table[: len(batch.block_table), : batch.block_table.shape[1]].copy_(batch.block_table)
        return own

    def fresh(self, batch: AttentionBatch) -> AttentionBatch:
        names = ("query_start_loc", "seq_lens", "slot_mapping")
        copies = {name: getattr(batch, name).clone() for name in names}
        table = torch.zeros(len(batch.block_table), 256, dtype=torch.int32)
        return evolve(batch, block_table=table, **copies)


class NewBuffers(OwnBuffers):
    """Each plan has buffers of its own, which a captured forward never sees."""

    def plan(self, batch: AttentionBatch) -> Any:
        self.buffers.clear()
        return super().plan(batch)


class ConstantLengths(ReadsTensors):
    """Lengths become constants when a shape is captured."""

    def plan(self, batch: AttentionBatch) -> Any:
        return evolve(batch, seq_lens=torch.from_numpy(batch.seq_lens_cpu))


def subject(factory: type, **changes: Any) -> Subject:
    offer = evolve(reference.capabilities, graphs=Level(GraphSupport.ALWAYS), **changes)
    return subject_of(evolve(reference, factory=factory, capabilities=offer), device=CPU)


def run_of(factory: type, case: dict[str, Any]) -> Run:
    return Run(subject(factory), case, seed=3)


CASES = graphs.cases_of_levels(subject(ReadsTensors))


@pytest.mark.parametrize("body", [graphs.replays, graphs.runs_ahead])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("factory", [ReadsTensors, OwnBuffers])
def test_backends_that_read_tensors_can_be_replayed(factory: type, case: dict[str, Any], body: Any) -> None:
    body(run_of(factory, case), call_again)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("factory", [EagerAttention, NewBuffers, ConstantLengths])
def test_a_capture_of_stale_lengths_or_buffers_is_seen(factory: type, case: dict[str, Any]) -> None:
    with pytest.raises((Failed, RuntimeError, IndexError)):
        graphs.replays(run_of(factory, case), call_again)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plan_that_fills_buffers_does_not_serve_every_replay(case: dict[str, Any]) -> None:
    for body in (graphs.replays, graphs.runs_ahead):
        body(Run(subject(ReadsTensors, plan_once=Flag(True)), case, seed=3), call_again)
        with pytest.raises((Failed, RuntimeError, IndexError)):
            body(Run(subject(OwnBuffers, plan_once=Flag(True)), case, seed=3), call_again)


class PrefixFromTensor(CascadeAttention):
    """Reads the length of the common prefix, and all else, from the batch's tensors when it runs."""

    def plan(self, batch: AttentionBatch) -> Any:
        return batch

    def now(self, batch: AttentionBatch) -> Any:
        length = 0 if batch.common_prefix is None else int(batch.common_prefix)
        lens = batch.seq_lens.numpy(), batch.query_start_loc.numpy()
        return super().plan(evolve(batch, common_prefix_len=length, seq_lens_cpu=lens[0], query_start_loc_cpu=lens[1]))

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Any) -> None:
        super().write(layer, key, value, cache, self.now(plan))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        return super().forward(layer, query, key, value, cache, self.now(plan), out, sinks)


class PrefixOfTheCapture(PrefixFromTensor):
    """The captured length of the common prefix stays."""

    def plan(self, batch: AttentionBatch) -> Any:
        kept = torch.tensor([batch.common_prefix_len]) if batch.common_prefix_len else None
        return evolve(batch, common_prefix=kept)


def test_a_cascade_that_reads_its_length_can_be_replayed_and_one_that_keeps_it_is_seen() -> None:
    graphs.replays_of_a_cascade(run_of(PrefixFromTensor, {}), call_again)
    with pytest.raises((Failed, RuntimeError)):
        graphs.replays_of_a_cascade(run_of(PrefixOfTheCapture, {}), call_again)


class GroupsFromTensors(GroupAttention):
    """Reads the prefixes of groups, and all else, from the batch's tensors when it runs."""

    def plan(self, batch: AttentionBatch) -> Any:
        return batch

    def now(self, batch: AttentionBatch) -> Any:
        lens = batch.seq_lens.numpy(), batch.query_start_loc.numpy()
        return super().plan(evolve(batch, seq_lens_cpu=lens[0], query_start_loc_cpu=lens[1]))

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Any) -> None:
        super().write(layer, key, value, cache, self.now(plan))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        return super().forward(layer, query, key, value, cache, self.now(plan), out, sinks)


class OwnKeysOfTheCapture(GroupsFromTensors):
    """The captured first keys of the own parts stay."""

    def plan(self, batch: AttentionBatch) -> Any:
        shared = batch.prefix_groups
        kept = None if shared is None else evolve(shared, own=shared.own.clone())
        return evolve(batch, prefix_groups=kept)


def test_groups_that_are_read_anew_can_be_replayed_and_those_of_the_capture_are_seen() -> None:
    declared: dict[str, Any] = {"cascade": Flag(True), "cascade_prefixes": "levels"}
    graphs.replays_of_groups(Run(subject(GroupsFromTensors, **declared), {}, seed=3), call_again)
    with pytest.raises((Failed, RuntimeError, IndexError)):
        graphs.replays_of_groups(Run(subject(OwnKeysOfTheCapture, **declared), {}, seed=3), call_again)


def test_cases_cover_each_declared_level() -> None:
    assert {case["graphs"] for case in CASES} == {"SINGLE_TOKEN", "UNIFORM", "ALWAYS"}


def test_the_checks_do_not_apply_on_a_cpu() -> None:
    both = subject(PrefixFromTensor, cascade=Flag(True))
    records = check_plugin(both, only=lambda item: item.id.startswith("attention.graphs."))
    assert {record.outcome for record in records} == {Outcome.SKIPPED}
    assert all("CUDA" in record.reason or "cascade_prefixes" in record.reason for record in records)
