"""Mutants that are right at small sizes and wrong beyond one, as kernels with a tile, a mask or a buffer too small.

Each class says what goes wrong, `beyond` from which size on.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from slotline.registry.capability import Flag
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache, TreeMask
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.mutants.attention.cascade import CascadeAttention
from slotline.testing.mutants.attention.making import mutant
from slotline.testing.reference.attention.backend import EagerAttention, Plan, raw


class Beyond(EagerAttention):
    """Backend with a size beyond which it is wrong, and the facts that its parts need."""

    beyond = 0
    part = 1
    window = 0

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of one request, with the layer at hand for the methods that do not get it."""
        self.layer = layer
        return super().attend(layer, query, keys, values, seen, sinks)


def at(kind: type[Beyond], beyond: int, part: int = 1) -> type[Beyond]:
    """Return a class with its size, and with the size of a part where it has one."""
    return type(kind.__name__, (kind,), {"beyond": beyond, "part": part})


# --- shapes of a layer


class KVHeads(Beyond):
    """KV heads beyond some are read modulo their number."""

    def expand(self, layer: AttentionLayer, heads: torch.Tensor) -> torch.Tensor:
        if heads.shape[1] > self.beyond:
            heads = heads[:, torch.arange(heads.shape[1]) % self.beyond]
        return super().expand(layer, heads)


class KVHeadsOfAPower(Beyond):
    """More KV heads than some are counted up to a power of two: the others are missing at the end of the grid."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out, number = super().combine(weights, values), self.layer.num_kv_heads
        kept = 1 << (number.bit_length() - 1)
        if number > self.beyond and number != kept:
            out[:, kept * self.layer.num_heads // number :] = 0
        return out


class Groups(Beyond):
    """Query heads of a group beyond some repeat the group's first ones."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out, group = super().combine(weights, values), self.layer.num_heads // self.layer.num_kv_heads
        if group > self.beyond and not self.layer.mla:
            heads = torch.arange(out.shape[1])
            out = out[:, heads // group * group + heads % group % self.beyond]
        return out


class GroupsOfAPower(Beyond):
    """Groups larger than some are taken for the next power of two."""

    def expand(self, layer: AttentionLayer, heads: torch.Tensor) -> torch.Tensor:
        group = layer.num_heads // layer.num_kv_heads
        if group <= self.beyond or layer.mla:
            return super().expand(layer, heads)
        return heads.float()[:, torch.arange(layer.num_heads) // (1 << (group - 1).bit_length())]


class Heads(Beyond):
    """Query heads beyond some are left at zero."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = super().combine(weights, values)
        out[:, self.beyond :] = 0
        return out


class HeadTail(Beyond):
    """Of a head larger than some, the numbers after its last whole part do not count."""

    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        size = query.shape[-1]
        kept = size if size <= self.beyond or layer.mla else size // self.part * self.part
        return super().scores(layer, query[..., :kept], keys[..., :kept])


class HeadCut(Beyond):
    """Scores count so many numbers of a head."""

    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        kept = query.shape[-1] if layer.mla else self.beyond
        return super().scores(layer, query[..., :kept], keys[..., :kept])


class ValueCut(Beyond):
    """So many numbers of an output are written, the others stay zero."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = super().combine(weights, values)
        if not self.layer.mla:
            out[..., self.beyond :] = 0
        return out


class HalfHeads(Beyond):
    """Heads larger than some are multiplied in bfloat16, to fit into a tile."""

    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        if query.shape[-1] > self.beyond and not layer.mla:
            query, keys = query.bfloat16(), keys.float().bfloat16()
        return super().scores(layer, query, keys)


class Pages(Beyond):
    """Offsets in a page are counted modulo some."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.block_size > self.beyond:
            cache = KVCache(*(view[:, torch.arange(view.shape[1]) % self.beyond] for view in cache))
        return super().gather(cache, plan, request, first, length)


class PagesOfAPower(Beyond):
    """Pages larger than some are found by a shift and a mask, as if their size were a power of two."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.block_size <= self.beyond:
            return super().gather(cache, plan, request, first, length)
        shift = self.block_size.bit_length() - 1
        positions = torch.arange(first, length, device=cache.key.device)
        indices = (positions >> shift).clamp(max=plan.block_table.shape[1] - 1)
        place = (self.blocks(plan, request, indices), positions & ((1 << shift) - 1))
        keys, values = (raw(view)[place].view(view.dtype) for view in cache)
        return keys, values


class WrittenPages(Beyond):
    """Tokens at an offset beyond some go to the page's start."""

    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        offsets = slots % self.block_size
        super().store(view, slots - offsets + offsets % self.beyond, new)


class WrittenHeads(Beyond):
    """KV heads beyond some are not stored."""

    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        super().store(view[:, :, : self.beyond], slots, new[:, : self.beyond])


class WrittenTail(Beyond):
    """Of a token's numbers over all KV heads, those after the last whole part are not stored if they are many."""

    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        many = new[0].numel() if len(new) else 0
        if many <= self.beyond:
            super().store(view, slots, new)
            return
        place = (slots // self.block_size, slots % self.block_size)
        old = view[place].flatten(1).float()
        rows = new.flatten(1).float().clone()
        end = many // self.part * self.part
        rows[:, end:] = old[:, end:]
        super().store(view, slots, rows.view_as(new))


# --- pairs of sizes: right in each by itself


class WideHeadsOfLargeGroups(Beyond):
    """Large groups and wide heads together overflow a tile: the last query head of each group is lost."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out, group = super().combine(weights, values), self.layer.num_heads // self.layer.num_kv_heads
        if group * self.layer.head_size > self.beyond and not self.layer.mla:
            out[:, group - 1 :: group] = 0
        return out


class WideRows(Beyond):
    """A token's numbers of all query heads are more than a program handles: the last ones stay zero."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = super().combine(weights, values)
        if not self.layer.mla:
            out.view(len(out), -1)[:, self.beyond :] = 0
        return out


class LargePagesOfManyHeads(Beyond):
    """Pages with many numbers wrap around: later tokens of a page are read from its start."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        room = max(1, self.beyond // cache.key[0, 0].numel())
        if room < self.block_size:
            cache = KVCache(*(view[:, torch.arange(view.shape[1]) % room] for view in cache))
        return super().gather(cache, plan, request, first, length)


# --- lengths


class LastOfTile(Beyond):
    """Beyond some keys, one key is lost at certain remainders of a tile."""

    remainders: tuple[int, ...] = ()

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if seen.shape[1] > self.beyond and seen.shape[1] % self.part in self.remainders:
            seen = seen.clone()
            seen[:, seen.shape[1] // self.part * self.part - 1] = False
        return super().attend(layer, query, keys, values, seen, sinks)


def loses(beyond: int, tile: int, *remainders: int) -> type[Beyond]:
    """Return a class that loses a key beyond some keys at remainders of a tile."""
    return type("LastOfTile", (LastOfTile,), {"beyond": beyond, "part": tile, "remainders": remainders})


class Splits(Beyond):
    """Keys beyond some are cut into equal parts, and those after the last whole part are lost."""

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length = seen.shape[1]
        if length > self.beyond and len(query) == 1 and length % self.part:
            seen = seen.clone()
            seen[:, length // self.part * self.part : length - 1] = False
        return super().attend(layer, query, keys, values, seen, sinks)


class HalfWeights(Beyond):
    """Beyond some keys, weights are kept in bfloat16 until they are multiplied."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        narrow = weights.bfloat16().float() if weights.shape[2] > self.beyond else weights
        return super().combine(narrow, values)


class Uncapped(Beyond):
    """Beyond some keys, the soft cap is left out."""

    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return scores if scores.shape[2] > self.beyond else super().cap(layer, scores)


class SinkOfEachSplit(Beyond):
    """Beyond some keys there are two parts, and each counts the sink."""

    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        again = sinks is not None and scores.shape[2] > self.beyond
        return super().softmax(scores, sinks + 0.6931472 if again and sinks is not None else sinks)


class SumOfLastSplit(Beyond):
    """Beyond some keys, the LSE is that of the last part."""

    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, lse = super().softmax(scores, sinks)
        if scores.shape[2] > self.beyond:
            lse = torch.logsumexp(scores[:, :, self.beyond :], dim=2)
        return weights, lse


class Windows(Beyond):
    """Windows larger than some are rounded up to whole parts."""

    def in_window(self, keys: torch.Tensor, own: torch.Tensor, window: int) -> torch.Tensor:
        wide = window > self.beyond
        return super().in_window(keys, own, -(-window // self.part) * self.part if wide else window)


class UnscaledTail(Beyond):
    """Beyond some keys, the scale of values is left out."""

    def scaled(
        self, layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        right = super().scaled(layer, keys, values)
        return right if len(keys) <= self.beyond or layer.mla else (right[0], values)


class Tables(Beyond):
    """Block tables are read modulo some entries."""

    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        return super().blocks(plan, request, indices % self.beyond)


class TablesOfChunks(Beyond):
    """The prefix of a chunk is read from so many entries of its table."""

    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        several = plan.starts[request + 1] - plan.starts[request] > 1
        return super().blocks(plan, request, indices.clamp(max=self.beyond - 1) if several else indices)


# --- requests, query tokens and rows


class Requests(Beyond):
    """The table's row of a request is counted modulo some."""

    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        return super().blocks(plan, request % self.beyond, indices)


class RequestsFinished(Beyond):
    """Requests beyond some get no output."""

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
        lse = super().forward(layer, query, key, value, cache, plan, out, sinks)
        if len(plan.lengths) > self.beyond:
            out[plan.starts[self.beyond] :] = 0
        return lse


class Lengths(Beyond):
    """Lengths of requests beyond some are those of the first ones, as far as the table reaches."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        query_lens = [stop - start for start, stop in zip(plan.starts, plan.starts[1:], strict=False)]
        lengths = [
            length if row < self.beyond or not length else max(query_lens[row], min(length, plan.lengths[row % 2]))
            for row, length in enumerate(plan.lengths)
        ]
        return evolve(plan, lengths=lengths)


class QueryTiles(Beyond):
    """Query tokens of a request beyond some, with a prefix, see as if they were the first ones."""

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        seen = super().visible(layer, plan, num_queries, first, length)
        if plan.causal and num_queries > self.beyond and length - first > num_queries:
            seen = seen.clone()
            seen[self.beyond :] = seen[: len(seen) - self.beyond]
        return seen


class QueryTail(Beyond):
    """Of more query tokens than some, those after the last whole tile stay zero."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = super().combine(weights, values)
        if len(out) > self.beyond:
            out[len(out) // self.part * self.part :] = 0
        return out


class Future(Beyond):
    """From the second large tile of query tokens on, a prompt's tokens see all of its keys."""

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        seen = super().visible(layer, plan, num_queries, first, length)
        if plan.causal and num_queries > self.beyond:
            seen = seen.clone()
            seen[self.beyond :] = True
        return seen


class Drafts(Beyond):
    """Tokens of short requests beyond some repeat the last one of the tile."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = super().combine(weights, values)
        if self.beyond < len(out) <= self.part:
            out[self.beyond :] = out[self.beyond - 1]
        return out


class DraftsOfAPower(Beyond):
    """Numbers of query tokens of some size are cut to a multiple of four."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = super().combine(weights, values)
        if self.beyond < len(out) <= self.part:
            out[len(out) // 4 * 4 :] = 0
        return out


class Nodes(Beyond):
    """Nodes of a tree beyond some are one bit of a mask that has no room for them: no query sees them."""

    def among_nodes(
        self, layer: AttentionLayer, tree: TreeMask, seen: torch.Tensor, nodes: int, first: int, length: int
    ) -> torch.Tensor:
        seen = super().among_nodes(layer, tree, seen, nodes, first, length)
        own = seen[:, -1:].clone()
        seen[:, length - nodes - first + self.beyond :] = False
        seen[-1:, -1:] = own[-1:]
        return seen


class Rows(Beyond):
    """Rows of a step beyond some are not computed."""

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
        lse = super().forward(layer, query, key, value, cache, plan, out, sinks)
        out[self.beyond :] = 0
        return lse


class RowTail(Rows):
    """Of more rows than some, those after the last whole tile are not computed."""

    def forward(self, *given: Any, **named: Any) -> torch.Tensor | None:
        lse = EagerAttention.forward(self, *given, **named)
        out = named["out"] if "out" in named else given[6]
        if len(out) > self.beyond:
            out[len(out) // self.part * self.part :] = 0
        return lse


class RowsWritten(Beyond):
    """New tokens of a step beyond some are not stored."""

    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        super().store(view, slots[: self.beyond], new[: self.beyond])


class RowsWrittenTail(Beyond):
    """Of more new tokens than some, those after the last whole tile are not stored."""

    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        kept = len(slots) if len(slots) <= self.beyond else len(slots) // self.part * self.part
        super().store(view, slots[:kept], new[:kept])


class BoundedByContext(Beyond):
    """A buffer for the scores holds so many keys of all requests together: later requests lose their first key."""

    def plan(self, batch: AttentionBatch) -> Plan:
        self.before = 0
        return super().plan(batch)

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.before += seen.shape[1]
        if self.before > self.beyond and seen.shape[1] > 1:
            seen = seen.clone()
            seen[1:, 0] = False
            seen[:1, 0] = seen.shape[1] == 1
        return super().attend(layer, query, keys, values, seen, sinks)


class KeptBuffer(Beyond):
    """Tables are copied into a buffer that grows for larger batches and then keeps what the larger one had."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.kept = torch.zeros(0, 0, dtype=torch.int32)

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        rows, width = plan.block_table.shape
        if rows <= self.beyond or width > self.kept.shape[1]:
            self.kept = plan.block_table.clone() if rows > self.beyond else self.kept
            return plan
        kept = self.kept[:rows, :width]
        table = plan.block_table.clone()
        table[self.beyond : len(kept)] = kept[self.beyond :]
        return evolve(plan, block_table=table)


# --- encoders


class Texts(Beyond):
    """An encoder's text is cut to some tokens: the later keys are not seen."""

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        seen = super().visible(layer, plan, num_queries, first, length)
        if layer.attention_type == self.of and seen.shape[1] > self.beyond:
            seen = seen.clone()
            seen[:, self.beyond :] = False
        return seen

    of = "encoder_only"


class Encoded(Texts):
    """An encoder's keys are cut to some for the layers that read them."""

    of = "cross"


# --- features


class PaddedRows(Beyond):
    """Padded rows beyond some are not cleared."""

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
        lse = super().forward(layer, query, key, value, cache, plan, out, sinks)
        out[plan.starts[-1] + self.beyond :] = torch.nan
        return lse


class LatentRequests(Requests):
    """The same of latents alone."""

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_latents = cache.key.data_ptr() == cache.value.data_ptr()
        return super().gather(cache, plan, request % self.beyond if of_latents else request, first, length)

    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        return EagerAttention.blocks(self, plan, request, indices)


class LatentTail(QueryTail):
    """The same of latents alone."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return super().combine(weights, values) if self.layer.mla else EagerAttention.combine(self, weights, values)


class LatentSplits(LastOfTile):
    """The same of latents alone."""

    remainders = (1, 4, 7)

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = (layer, query, keys, values, seen, sinks)
        self.layer = layer
        return super().attend(*given) if layer.mla else EagerAttention.attend(self, *given)


class PrefixTable(CascadeAttention):
    """A common prefix is read from 1,024 entries of the table."""

    def prefix_table(self, batch: AttentionBatch) -> torch.Tensor:
        return batch.block_table[:1, torch.arange(batch.block_table.shape[1]) % 1024]


L1, L2 = Level.NUMERICS, Level.HOSTILE

MUTANTS: tuple[Mutant, ...] = (
    mutant("ninth-kv-head", L1, "KV heads beyond the eighth read the first ones", at(KVHeads, 8)),
    mutant("thirteenth-kv-head", L1, "KV heads beyond the twelfth read the first ones", at(KVHeads, 12)),
    mutant("kv-heads-of-a-power", L1, "above 4 KV heads, those above a power of two are lost", at(KVHeadsOfAPower, 4)),
    mutant("ninth-of-a-group", L1, "query heads of a group beyond its eighth repeat others", at(Groups, 8)),
    mutant("thirteenth-of-a-group", L1, "query heads of a group beyond its twelfth repeat others", at(Groups, 12)),
    mutant("groups-of-a-power", L1, "groups above 8 are taken for 16", at(GroupsOfAPower, 8)),
    mutant("heads-beyond-32", L1, "query heads beyond the 32nd stay zero", at(Heads, 32)),
    mutant("heads-beyond-64", L1, "query heads beyond the 64th stay zero", at(Heads, 64)),
    mutant("head-tail-of-16", L1, "heads above 96 count whole sixteens", at(HeadTail, 96, 16)),
    mutant("head-tail-of-32", L1, "heads above 128 count whole 32s", at(HeadTail, 128, 32)),
    mutant("head-tail-of-128", L1, "heads above 128 count whole 128s", at(HeadTail, 128, 128)),
    mutant("scores-of-128-numbers", L1, "scores count 128 numbers of a head", at(HeadCut, 128)),
    mutant("scores-of-192-numbers", L1, "scores count 192 numbers of a head", at(HeadCut, 192)),
    mutant("values-of-128-numbers", L1, "128 numbers of a value count", at(ValueCut, 128)),
    mutant("half-of-wide-heads", L1, "heads above 160 are multiplied in bfloat16", at(HalfHeads, 160)),
    mutant("pages-beyond-64", L1, "offsets in a page count modulo 64", at(Pages, 64)),
    mutant("pages-beyond-128", L1, "offsets in a page count modulo 128", at(Pages, 128)),
    mutant("large-pages-of-a-power", L1, "pages above 64 are found by a shift", at(PagesOfAPower, 64)),
    mutant(
        "written-beyond-64-of-a-page", L1, "tokens beyond a page's 64th are stored at its start", at(WrittenPages, 64)
    ),
    mutant("ninth-kv-head-unwritten", L1, "KV heads beyond the eighth are not stored", at(WrittenHeads, 8)),
    mutant("wide-rows-unwritten", L1, "of rows above 1,024 numbers the tail is not stored", at(WrittenTail, 1024, 512)),
    mutant(
        "wide-heads-of-large-groups",
        L1,
        "of groups times heads above 1,536 a head is lost",
        at(WideHeadsOfLargeGroups, 1536),
    ),
    mutant("rows-of-4096-numbers", L1, "4,096 numbers of a row of out are written", at(WideRows, 4096)),
    mutant(
        "pages-of-16384-numbers",
        L1,
        "tokens of a page after 16,384 numbers are read at its start",
        at(LargePagesOfManyHeads, 16384),
    ),
    mutant(
        "first-after-tile-lost", L1, "beyond 1,024 keys, one after whole tiles of 64 loses a key", loses(1024, 64, 1)
    ),
    mutant("last-of-tile-lost", L1, "beyond 1,024 keys, one before a tile of 64 ends loses a key", loses(1024, 64, 63)),
    mutant("whole-tiles-lose-one", L1, "beyond 1,024 keys, whole tiles of 64 lose a key", loses(1024, 64, 0)),
    mutant("middle-of-tile-lost", L1, "beyond 1,024 keys, the remainder 37 of a tile loses a key", loses(1024, 64, 37)),
    mutant(
        "remainder-of-128-lost",
        L1,
        "beyond 1,024 keys, remainders of 128 from 97 on lose a key",
        loses(1024, 128, *range(97, 128)),
    ),
    mutant("splits-lose-the-rest", L1, "beyond 1,024 keys, those after whole parts of 4 are lost", at(Splits, 1024, 4)),
    mutant("half-weights-of-long", L1, "beyond 1,024 keys, weights are bfloat16", at(HalfWeights, 1024)),
    mutant("uncapped-when-long", L1, "beyond 1,024 keys, there is no soft cap", at(Uncapped, 1024)),
    mutant("sink-of-each-split", L1, "beyond 1,024 keys, the sink counts twice", at(SinkOfEachSplit, 1024)),
    mutant("lse-of-last-split", L1, "beyond 1,024 keys, the LSE is that of the last part", at(SumOfLastSplit, 1024)),
    mutant("windows-of-whole-tiles", L1, "windows above 256 are rounded up to tiles of 64", at(Windows, 256, 64)),
    mutant("windows-of-whole-thousands", L1, "windows above 1,024 are rounded up to 512s", at(Windows, 1024, 512)),
    mutant("value-scale-lost-when-long", L1, "beyond 1,024 keys, values are not scaled", at(UnscaledTail, 1024)),
    mutant("tables-of-256", L1, "block tables are read modulo 256 entries", at(Tables, 256)),
    mutant("tables-of-1024", L1, "block tables are read modulo 1,024 entries", at(Tables, 1024)),
    mutant("chunks-of-1024-blocks", L1, "the table of a chunk ends at 1,024 entries", at(TablesOfChunks, 1024)),
    mutant("requests-modulo-32", L1, "rows of the table are counted modulo 32", at(Requests, 32)),
    mutant("requests-modulo-64", L1, "rows of the table are counted modulo 64", at(Requests, 64)),
    mutant("requests-modulo-128", L1, "rows of the table are counted modulo 128", at(Requests, 128)),
    mutant("requests-beyond-64", L1, "requests beyond the 64th get no output", at(RequestsFinished, 64)),
    mutant("lengths-of-64-requests", L1, "lengths beyond the 64th are those of the first", at(Lengths, 64)),
    mutant(
        "chunk-beyond-256", L1, "query tokens beyond 256 with a prefix see like the first ones", at(QueryTiles, 256)
    ),
    mutant(
        "chunk-beyond-512", L1, "query tokens beyond 512 with a prefix see like the first ones", at(QueryTiles, 512)
    ),
    mutant("chunk-tail-lost", L1, "of more than 256 query tokens the last tile stays zero", at(QueryTail, 256, 64)),
    mutant("future-beyond-256", L1, "query tokens beyond 256 see all keys", at(Future, 256)),
    mutant("drafts-beyond-8", L1, "of 9 to 16 query tokens those beyond the eighth repeat it", at(Drafts, 8, 16)),
    mutant("drafts-beyond-5", L1, "of 6 to 8 query tokens those beyond the fifth repeat it", at(Drafts, 5, 8)),
    mutant(
        "drafts-of-whole-fours",
        L1,
        "of 9 to 32 query tokens those after whole fours stay zero",
        at(DraftsOfAPower, 8, 32),
    ),
    mutant("nodes-beyond-8", L1, "nodes of a tree beyond the eighth are seen by none", at(Nodes, 8)),
    mutant("nodes-beyond-32", L1, "nodes of a tree beyond the 32nd are seen by none", at(Nodes, 32)),
    mutant("rows-beyond-256", L1, "rows of a step beyond 256 are not computed", at(Rows, 256)),
    mutant("rows-beyond-1024", L1, "rows of a step beyond 1,024 are not computed", at(Rows, 1024)),
    mutant("row-tail-lost", L1, "of more than 128 rows the last tile is not computed", at(RowTail, 128, 128)),
    mutant("rows-written-to-128", L1, "new tokens beyond 128 are not stored", at(RowsWritten, 128)),
    mutant("rows-written-to-512", L1, "new tokens beyond 512 are not stored", at(RowsWritten, 512)),
    mutant(
        "rows-written-in-tiles",
        L1,
        "of more than 128 new tokens the last tile is not stored",
        at(RowsWrittenTail, 128, 32),
    ),
    mutant("scores-of-16384-keys", L1, "requests after 16,384 keys in all lose a key", at(BoundedByContext, 16384)),
    mutant("tables-of-larger-batch", L2, "beyond 32 requests a larger batch's tables are kept", at(KeptBuffer, 32)),
    mutant("texts-of-512", L1, "an encoder's text is seen up to 512 tokens", at(Texts, 512)),
    mutant("encoded-of-512", L1, "512 keys of an encoder are read", at(Encoded, 512)),
    mutant("padding-beyond-64", L2, "padded rows beyond the 64th are not cleared", at(PaddedRows, 64)),
    mutant("latents-of-64-requests", L1, "rows of a table of latents are counted modulo 64", at(LatentRequests, 64)),
    mutant(
        "latent-chunk-tail-lost",
        L1,
        "of more than 256 query tokens of latents the last are lost",
        at(LatentTail, 256, 64),
    ),
    mutant(
        "latent-after-tile-lost",
        L1,
        "beyond 1,024 latents, some remainders of a tile lose one",
        at(LatentSplits, 1024, 64),
    ),
    mutant("prefix-of-1024-blocks", L1, "a common prefix is read from 1,024 entries", PrefixTable, cascade=Flag(True)),
)
