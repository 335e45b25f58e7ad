"""Mutants that keep what belongs to an earlier batch, as a cache with a wrong key or a badly captured graph does."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from attrs import evolve

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache
from slotline.testing.check import Level
from slotline.testing.mutants.attention.making import mutant
from slotline.testing.reference.attention.backend import EagerAttention, Plan


class _Remembers(EagerAttention):
    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.kept: dict[Any, Any] = {}


class FirstPlanForever(_Remembers):
    """Replays the first plan of each shape of batch."""

    def plan(self, batch: AttentionBatch) -> Plan:
        shape = tuple(batch.query_start_loc_cpu.tolist()), tuple(batch.block_table.shape)
        kept: Plan = self.kept.setdefault(shape, super().plan(batch))
        return kept


class StaleLengths(_Remembers):
    """Keeps the lengths with which a batch shape was first seen, as constants baked into a graph."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        return evolve(plan, lengths=self.kept.setdefault(tuple(plan.starts), plan.lengths))


class StaleTable(_Remembers):
    """Copies the block table with the first batch of a shape. Later batches use the copy."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        key = (tuple(plan.starts), tuple(batch.block_table.shape))
        return evolve(plan, block_table=self.kept.setdefault(key, batch.block_table.clone()))


class StaleSlots(_Remembers):
    """The slots of new tokens are those of the first batch of a shape."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        return evolve(plan, slot_mapping=self.kept.setdefault(tuple(plan.starts), batch.slot_mapping.clone()))


class PlanByTableContents(_Remembers):
    """A plan is found again by the contents of the block table, which may stay while lengths grow."""

    def plan(self, batch: AttentionBatch) -> Plan:
        key = (batch.block_table.numpy(force=True).tobytes(), tuple(batch.query_start_loc_cpu.tolist()))
        kept: Plan = self.kept.setdefault(key, super().plan(batch))
        return evolve(kept, slot_mapping=batch.slot_mapping)


class PlanByLengths(_Remembers):
    """A plan is found again by its lengths, which other requests may have as well."""

    def plan(self, batch: AttentionBatch) -> Plan:
        key = (tuple(batch.seq_lens_cpu.tolist()), tuple(batch.query_start_loc_cpu.tolist()))
        kept: Plan = self.kept.setdefault(key, super().plan(batch))
        return evolve(kept, slot_mapping=batch.slot_mapping)


class TableWidthOfFirstBatch(_Remembers):
    """The buffer for block tables has the width of the first batch."""

    def plan(self, batch: AttentionBatch) -> Plan:
        width = self.kept.setdefault("width", batch.block_table.shape[1])
        plan = super().plan(batch)
        table = torch.nn.functional.pad(batch.block_table, (0, max(0, width - batch.block_table.shape[1])))
        columns = torch.arange(table.shape[1], device=table.device).clamp(max=width - 1)
        return evolve(plan, block_table=table[:, columns])


class KeepsGatheredKeys(_Remembers):
    """Gathered keys are kept by first block and length, though the cache was written since."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = (tuple(plan.block_table[request].tolist()), first, length)
        kept: tuple[torch.Tensor, torch.Tensor] = self.kept.setdefault(
            key, super().gather(cache, plan, request, first, length)
        )
        return kept


class GrowingHistory(_Remembers):
    """Keys are appended to those kept for a request's first block: a new owner of the block inherits them."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().gather(cache, plan, request, first, length)
        key = int(plan.block_table[request, 0])
        old = self.kept.get(key)
        if old is not None and 0 < len(old[0]) <= length and first == 0:
            found = (
                torch.cat([old[0], found[0][len(old[0]) :]]),
                torch.cat([old[1], found[1][len(old[1]) :]]),
            )
        if first == 0:
            self.kept[key] = found
        return found


class OneBufferForLengths(_Remembers):
    """Lengths go into a buffer that is only raised: a shorter request in the same row stays long."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        room = plan.block_table.shape[1] * self.block_size
        rows = [min(room, max(self.kept.get(row, 0), length)) for row, length in enumerate(plan.lengths)]
        self.kept = dict(enumerate(rows))
        return evolve(plan, lengths=rows)


class PlanSharedByInstances(EagerAttention):
    """Calls use the plan made last, which may be another group's."""

    newest: ClassVar[Plan | None] = None

    def plan(self, batch: AttentionBatch) -> Plan:
        PlanSharedByInstances.newest = super().plan(batch)
        return PlanSharedByInstances.newest

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        assert self.newest is not None
        return super().forward(layer, query, key, value, cache, self.newest, out, sinks)


class WindowSharedByInstances(EagerAttention):
    """Two groups of a model share what belongs to each: the window of the group built last."""

    window: ClassVar[int | None] = None

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        WindowSharedByInstances.window = context.layers[0].window

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        return super().visible(evolve(layer, window=self.window), plan, num_queries, first, length)

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        return super().first_key(evolve(layer, window=self.window), num_queries, length)


class CacheOfFirstLayer(EagerAttention):
    """The first layer's cache is read for all layers."""

    first: KVCache | None = None

    def plan(self, batch: AttentionBatch) -> Plan:
        self.first = None
        return super().plan(batch)

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.first = self.first or cache
        return super().gather(self.first, plan, request, first, length)


class WritesOncePerStep(_Remembers):
    """New tokens are stored only for the first layer of a step."""

    def plan(self, batch: AttentionBatch) -> Plan:
        self.kept.clear()
        return super().plan(batch)

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        if not self.kept.setdefault("written", False):
            super().write(layer, key, value, cache, plan)
        self.kept["written"] = True


class HostLengths(EagerAttention):
    """Lengths are the host's, in spite of bounded_lengths."""

    def plan(self, batch: AttentionBatch) -> Plan:
        return evolve(super().plan(batch), lengths=batch.seq_lens_cpu.tolist())


class PlanMadeLast(_Remembers):
    """forward takes the plan made last, in spite of several_plans."""

    def plan(self, batch: AttentionBatch) -> Plan:
        self.kept["plan"] = super().plan(batch)
        plan: Plan = self.kept["plan"]
        return plan

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        return super().forward(layer, query, key, value, cache, self.kept["plan"], out, sinks)


class SeesWhatWriteStored(_Remembers):
    """New tokens are seen once `write` was called, in spite of plain_writes."""

    def plan(self, batch: AttentionBatch) -> Plan:
        self.kept.clear()
        return super().plan(batch)

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        super().write(layer, key, value, cache, plan)
        self.kept["written"] = True

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().gather(cache, plan, request, first, length)
        if not self.kept:
            values[len(values) - (plan.starts[request + 1] - plan.starts[request]) :] = 0
        return keys, values


L2, L3 = Level.HOSTILE, Level.STATEFUL

MUTANTS = (
    mutant("plan-of-first-batch", L2, "a shape of batch keeps its first plan", FirstPlanForever),
    mutant("stale-lengths", L2, "a shape of batch keeps its first lengths", StaleLengths),
    mutant("stale-block-table", L2, "a shape of batch keeps its first block table", StaleTable),
    mutant("stale-slots", L2, "a shape of batch keeps its first slots", StaleSlots),
    mutant("plan-by-table-contents", L3, "equal block tables are taken for equal batches", PlanByTableContents),
    mutant("plan-by-lengths", L2, "equal lengths are taken for equal batches", PlanByLengths),
    mutant("table-width-of-first-batch", L2, "longer tables than the first are cut", TableWidthOfFirstBatch),
    mutant("gathered-keys-kept", L2, "gathered keys outlive the block's owner", KeepsGatheredKeys),
    mutant("history-by-first-block", L2, "a block's next owner inherits the history", GrowingHistory),
    mutant("lengths-only-grow", L2, "a row's length never falls", OneBufferForLengths),
    mutant("plan-shared-by-groups", L3, "forward uses the plan of the group that planned last", PlanSharedByInstances),
    mutant("window-shared-by-groups", L3, "two built groups share one window", WindowSharedByInstances),
    mutant("cache-of-first-layer", L2, "all layers of a group read the first one's cache", CacheOfFirstLayer),
    mutant("seen-once-written", L2, "declares plain_writes, but write counts", SeesWhatWriteStored, plain_writes=True),
    mutant("plan-made-last", L2, "declares several_plans, but the last one counts", PlanMadeLast, several_plans=True),
    mutant("bounds-for-lengths", L2, "the host's lengths are taken for exact", HostLengths),
    mutant("written-once-per-step", L2, "the first layer's tokens alone are stored", WritesOncePerStep),
)
