"""Mutants whose answer or manners are wrong: the LSE, the output buffer, inputs that change, odd batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import evolve

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache
from slotline.testing.check import Level
from slotline.testing.mutants.attention.making import mutant
from slotline.testing.reference.attention.backend import EagerAttention, Plan

# --- LSE


class LSEInBaseTwo(EagerAttention):
    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, lse = super().softmax(scores, sinks)
        return weights, lse / math.log(2)


class LSEWithoutPeak(EagerAttention):
    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, lse = super().softmax(scores, sinks)
        return weights, lse - scores.amax(dim=2)


class LSEWithoutSinks(EagerAttention):
    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, _ = super().softmax(scores, sinks)
        return weights, torch.logsumexp(scores, dim=2)


class LSEOverQueries(EagerAttention):
    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, lse = super().softmax(scores, sinks)
        return weights, torch.logsumexp(lse, dim=1, keepdim=True).expand_as(lse)


class LSEOfMaskedToo(EagerAttention):
    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, _ = super().attend(layer, query, keys, values, seen, sinks)
        return out, self.softmax(self.scores(layer, query, keys), sinks)[1]


# --- the output and the inputs


class _Forward(EagerAttention):
    """Has one place around `forward` to be wrong in."""

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
        return self.around(
            out, plan, query, lambda target: self.inner(layer, query, key, value, cache, plan, target, sinks)
        )

    def inner(self, *given: Any) -> torch.Tensor | None:
        return super().forward(*given)

    def around(self, out: torch.Tensor, plan: Plan, query: torch.Tensor, run: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = run(out)
        return found


class LeavesOutAlone(_Forward):
    def around(self, out: torch.Tensor, plan: Plan, query: torch.Tensor, run: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = run(out.clone())
        return found


class AddsToOut(_Forward):
    def around(self, out: torch.Tensor, plan: Plan, query: torch.Tensor, run: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = run(own := torch.empty_like(out))
        out += own
        return found


class PaddedRowsNaN(_Forward):
    def around(self, out: torch.Tensor, plan: Plan, query: torch.Tensor, run: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = run(out)
        out[plan.starts[-1] :] = torch.nan
        return found


class WritesBehindOut(_Forward):
    """Rounds the number of rows up to four."""

    def around(self, out: torch.Tensor, plan: Plan, query: torch.Tensor, run: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = run(out)
        room = out.untyped_storage().nbytes() // out.element_size() - out.storage_offset()
        rows = min(-(-len(out) // 4) * 4 + 1, room // out.stride(0))
        out.as_strided((rows, *out.shape[1:]), out.stride())[len(out) :] = 0
        return found


class ScalesQueryInPlace(_Forward):
    def around(self, out: torch.Tensor, plan: Plan, query: torch.Tensor, run: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = run(out)
        query.mul_(0.5)
        return found


class FillsPaddingOfQuery(_Forward):
    def around(self, out: torch.Tensor, plan: Plan, query: torch.Tensor, run: Any) -> torch.Tensor | None:
        query[plan.starts[-1] :] = 0
        found: torch.Tensor | None = run(out)
        return found


class DenseOut(_Forward):
    """Takes `out` for contiguous: rows of a wider buffer are hit wrongly."""

    def around(self, out: torch.Tensor, plan: Plan, query: torch.Tensor, run: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = run(own := torch.empty_like(out, memory_format=torch.contiguous_format))
        flat = out.as_strided((own.numel(),), (1,))
        flat.copy_(own.flatten())
        return found


class DenseQuery(_Forward):
    """Takes `query`, `key` and `value` for contiguous: views of one fused projection are read wrongly."""

    def inner(self, *given: Any) -> torch.Tensor | None:
        layer, query, *rest = given
        return super().inner(layer, query.as_strided(query.shape, torch.empty(query.shape).stride()), *rest)


class DenseHeadsOfQuery(_Forward):
    """Takes the heads of a query for rows that lie behind each other: an expanded query is read wrongly."""

    def inner(self, *given: Any) -> torch.Tensor | None:
        layer, query, *rest = given
        size = query.shape[2]
        backing = query.untyped_storage().nbytes() // query.itemsize
        read = torch.arange(len(query))[:, None] * query.stride(0) + torch.arange(query.shape[1] * size)
        places = (query.storage_offset() + read).clamp(max=backing - 1)
        flat = query.as_strided((backing,), (1,), 0)
        return super().inner(layer, flat[places].view(query.shape), *rest)


class DenseHeadsOfOut(_Forward):
    """Takes the heads of `out` for rows that lie behind each other."""

    def around(self, out: torch.Tensor, plan: Plan, query: torch.Tensor, run: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = run(own := torch.empty_like(out, memory_format=torch.contiguous_format))
        for token, row in enumerate(own):
            out[token].as_strided((row.numel(),), (1,)).copy_(row.flatten())
        return found


class DenseTable(EagerAttention):
    """Takes the rows of the block table for as long as it is wide."""

    def plan(self, batch: AttentionBatch) -> Plan:
        table = batch.block_table
        if table.numel():
            table = table.as_strided(table.shape, (table.shape[1], 1))
        return super().plan(evolve(batch, block_table=table))


class FirstHeadWritten(EagerAttention):
    """Takes an expanded key for one of a single head."""

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        if key.stride(1) == 0 and key.shape[1] > 1:
            key = torch.cat([key[:, :1], torch.zeros_like(key[:, 1:])], 1)
        super().write(layer, key, value, cache, plan)


class ClampsTable(EagerAttention):
    """Replaces entries of the block table that lie past a request's end, in place."""

    def plan(self, batch: AttentionBatch) -> Plan:
        for request, length in enumerate(batch.seq_lens_cpu.tolist()):
            batch.block_table[request, -(-length // self.block_size) :] = 0
        return super().plan(batch)


class MapsPaddingAway(EagerAttention):
    """Sends slots -1 to slot 0, in the tensor that it was given."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = evolve(super().plan(batch), slot_mapping=batch.slot_mapping.clone())
        batch.slot_mapping.clamp_(min=0)
        return plan


# --- odd batches


class NoEmptyRequests(EagerAttention):
    """Fails on a request without new tokens."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        lengths = [stop - start for start, stop in zip(plan.starts, plan.starts[1:], strict=False)]
        if not all(lengths):
            raise ValueError("a request without query tokens")
        return plan


class SkipsAfterEmptyRequest(EagerAttention):
    """Stops at the first request without new tokens."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        pairs = zip(plan.starts, plan.starts[1:], strict=False)
        end = next((row for row, (start, stop) in enumerate(pairs) if start == stop), len(plan.lengths))
        return evolve(plan, lengths=plan.lengths[:end])


class LongestForAll(EagerAttention):
    """Every request is as long as its blocks allow, up to the batch's longest."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        size = self.block_size
        return evolve(plan, lengths=[min(batch.max_seq_len, -(-length // size) * size) for length in plan.lengths])


class DecodesAreAllSingle(EagerAttention):
    """Takes the whole batch for decodes if the first request is one."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        if 0 < batch.num_decodes < batch.num_requests:
            starts = [min(row, plan.starts[-1]) for row in range(len(plan.starts) - 1)]
            return evolve(plan, starts=[*starts, plan.starts[-1]])
        return plan


class OneThousandTokens(EagerAttention):
    """Attends to the last 512 tokens of a request at most."""

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        seen = super().visible(layer, plan, num_queries, first, length)
        return seen & (torch.arange(first, length) >= length - 512)[None, :]


class SortedByLength(EagerAttention):
    """Handles long requests first and forgets to put the results back."""

    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        order = sorted(range(len(plan.lengths)), key=lambda row: -plan.lengths[row])
        same = [row for row in order if plan.lengths[row] == plan.lengths[request]]
        return super().blocks(plan, same[0], indices)


class NoBatchOfNothing(EagerAttention):
    """Fails on a batch in which no request has a token."""

    def plan(self, batch: AttentionBatch) -> Plan:
        assert batch.max_query_len > 0
        return super().plan(batch)


class OneMoreToken(EagerAttention):
    """Has workspace for one token less than the bounds say."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.longest = context.max_query_len

    def plan(self, batch: AttentionBatch) -> Plan:
        if batch.max_query_len >= self.longest > 1:
            raise ValueError(f"{batch.max_query_len} query tokens do not fit")
        return super().plan(batch)


L1, L2 = Level.NUMERICS, Level.HOSTILE

MUTANTS = (
    mutant("lse-in-base-2", L1, "the LSE is in base 2, e is declared", LSEInBaseTwo),
    mutant("lse-without-peak", L1, "the maximum is not added back to the LSE", LSEWithoutPeak),
    mutant("lse-over-queries", L1, "the LSE sums over the queries", LSEOverQueries),
    mutant("lse-without-sinks", L1, "the LSE leaves the sinks out", LSEWithoutSinks),
    mutant("lse-of-masked-keys", L1, "the LSE counts masked keys", LSEOfMaskedToo),
    mutant("out-left-alone", L1, "the output goes to another tensor", LeavesOutAlone),
    mutant("out-added-to", L1, "the output is added to what out held", AddsToOut),
    mutant("padded-rows-nan", L2, "padded rows of the output are NaN", PaddedRowsNaN),
    mutant("out-overrun", L1, "rows behind the output are written", WritesBehindOut),
    mutant("out-taken-as-dense", L2, "the strides of out are ignored", DenseOut),
    mutant("query-taken-as-dense", L2, "the strides of the query are ignored", DenseQuery),
    mutant("heads-of-query-dense", L2, "the stride of a query's heads is ignored", DenseHeadsOfQuery, any_strides=True),
    mutant("heads-of-out-dense", L2, "the stride of out's heads is ignored", DenseHeadsOfOut, any_strides=True),
    mutant("table-taken-as-dense", L2, "the stride of the block table is ignored", DenseTable, any_strides=True),
    mutant("expanded-key-once", L2, "an expanded key is stored in the first head", FirstHeadWritten, any_strides=True),
    mutant("query-scaled-in-place", L1, "the query is changed", ScalesQueryInPlace),
    mutant("query-padding-filled", L2, "padded rows of the query are changed", FillsPaddingOfQuery),
    mutant("block-table-cleaned", L2, "unused entries of the block table are changed", ClampsTable),
    mutant("slot-mapping-clamped", L2, "slots -1 are changed in place", MapsPaddingAway),
    mutant("no-empty-requests", L1, "a request without new tokens is an error", NoEmptyRequests),
    mutant("stops-at-empty-request", L1, "requests after one without new tokens are skipped", SkipsAfterEmptyRequest),
    mutant("longest-for-all", L1, "the batch's longest length is used for all", LongestForAll),
    mutant("all-decodes", L1, "one leading decode makes all requests decodes", DecodesAreAllSingle),
    mutant("last-512-tokens", L1, "a request's older tokens are not seen", OneThousandTokens),
    mutant("twins-share-blocks", L1, "requests of one length read the first one's blocks", SortedByLength),
    mutant("no-empty-batch", L2, "a batch without tokens is an error", NoBatchOfNothing),
    mutant("longest-query-refused", L1, "a query of the longest length is an error", OneMoreToken),
)
