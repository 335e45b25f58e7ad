"""Mutants that see a wrong set of keys."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, TreeMask
from slotline.testing.check import Level
from slotline.testing.mutants.attention.making import mutant
from slotline.testing.reference.attention.backend import EagerAttention, Plan


class CausalHidesOwnToken(EagerAttention):
    def not_after(self, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return (keys < own) | (own == 0)


class CausalShowsNextToken(EagerAttention):
    def not_after(self, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return keys <= own + 1


class CausalTopLeft(EagerAttention):
    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        if num_queries == 1:
            return super().visible(layer, plan, num_queries, first, length)
        keys, own = torch.arange(first, length)[None, :], torch.arange(num_queries)[:, None]
        return keys - first <= own if plan.causal else torch.ones(num_queries, length - first, dtype=torch.bool)


class CausalByBlock(EagerAttention):
    def not_after(self, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return keys // self.block_size <= own // self.block_size


class CausalIgnoredInPrefill(EagerAttention):
    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        plan = evolve(plan, causal=plan.causal and num_queries != length)
        return super().visible(layer, plan, num_queries, first, length)


class CausalIgnoredInVerify(EagerAttention):
    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        plan = evolve(plan, causal=plan.causal and num_queries > 8)
        return super().visible(layer, plan, num_queries, first, length)


class CausalInEncoders(EagerAttention):
    def plan(self, batch: AttentionBatch) -> Plan:
        return evolve(super().plan(batch), causal=True)


class EncoderWindowEndless(EagerAttention):
    def before_window_end(self, keys: torch.Tensor, own: torch.Tensor, window: int) -> torch.Tensor:
        return torch.ones_like(keys + own, dtype=torch.bool)


class EncoderKeysByTokens(EagerAttention):
    """Stores as many of an encoder's keys as the step has query tokens."""

    def plan(self, batch: AttentionBatch) -> Plan:
        return evolve(super().plan(batch), slot_mapping=batch.slot_mapping[: batch.num_tokens])


class ImagesAreCausal(EagerAttention):
    def ahead(self, keys_ahead: torch.Tensor, first: int, length: int) -> torch.Tensor:
        return torch.zeros(len(keys_ahead), length - first, dtype=torch.bool)


class ImagesSeeAll(EagerAttention):
    """Tokens of an image see all keys of the request, as in an encoder."""

    def ahead(self, keys_ahead: torch.Tensor, first: int, length: int) -> torch.Tensor:
        return super().ahead(torch.where(keys_ahead > 0, length, 0), first, length)


class ImagesWithoutLastToken(EagerAttention):
    def ahead(self, keys_ahead: torch.Tensor, first: int, length: int) -> torch.Tensor:
        return super().ahead(keys_ahead - 1, first, length)


class ImagesByFirstToken(EagerAttention):
    """Takes each request's first count for all of its tokens."""

    def ahead(self, keys_ahead: torch.Tensor, first: int, length: int) -> torch.Tensor:
        return super().ahead(keys_ahead[:1].expand(len(keys_ahead)), first, length)


class TreeSeesAllNodes(EagerAttention):
    def among_nodes(self, layer: AttentionLayer, tree: TreeMask, seen: torch.Tensor, *rest: int) -> torch.Tensor:
        return seen


class TreeWindowBySlot(EagerAttention):
    def node_positions(self, tree: TreeMask, nodes: int, known: int) -> torch.Tensor:
        return torch.arange(known, known + nodes)


class TreeOfFirstRequest(EagerAttention):
    def tree_of(self, tree: TreeMask, request: int) -> TreeMask:
        return super().tree_of(tree, 0)


class TreeBeginsWithQueries(EagerAttention):
    """Takes a request's first query among the nodes for the first node."""

    def among_nodes(self, layer: AttentionLayer, tree: TreeMask, seen: torch.Tensor, *rest: int) -> torch.Tensor:
        nodes, first, length = rest
        return super().among_nodes(layer, tree, seen, min(nodes, len(seen)), first, length)


class WindowOfOneLess(EagerAttention):
    def in_window(self, keys: torch.Tensor, own: torch.Tensor, window: int) -> torch.Tensor:
        return super().in_window(keys, own, max(window - 1, 1))


class WindowOfOneMore(EagerAttention):
    def in_window(self, keys: torch.Tensor, own: torch.Tensor, window: int) -> torch.Tensor:
        return super().in_window(keys, own, window + 1)

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        return max(0, super().first_key(layer, num_queries, length) - 1)


class WindowByBlock(EagerAttention):
    def in_window(self, keys: torch.Tensor, own: torch.Tensor, window: int) -> torch.Tensor:
        lowest = (own - window + 1).clamp(min=0)
        return keys >= lowest // self.block_size * self.block_size

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        return super().first_key(layer, num_queries, length) // self.block_size * self.block_size


class WindowIgnored(EagerAttention):
    def in_window(self, keys: torch.Tensor, own: torch.Tensor, window: int) -> torch.Tensor:
        return torch.ones_like(keys == own)

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        return 0


class WindowIgnoredInDecode(EagerAttention):
    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        return super().visible(self.widened(layer, num_queries), plan, num_queries, first, length)

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        return super().first_key(self.widened(layer, num_queries), num_queries, length)

    def widened(self, layer: AttentionLayer, num_queries: int) -> AttentionLayer:
        return evolve(layer, window=None) if num_queries == 1 else layer


class WindowOffWithPrefix(EagerAttention):
    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        if 1 < num_queries < length:  # counts the window from the chunk's start
            keys, own = torch.arange(first, length)[None, :], torch.arange(length - num_queries, length)[:, None]
            in_chunk = keys >= length - num_queries
            seen = self.not_after(keys, own) if plan.causal else torch.ones_like(keys == own)
            near = torch.ones_like(seen) if layer.window is None else self.in_window(keys, own, layer.window)
            return seen & (near | ~in_chunk)
        return super().visible(layer, plan, num_queries, first, length)


class WindowFromLastQuery(EagerAttention):
    def in_window(self, keys: torch.Tensor, own: torch.Tensor, window: int) -> torch.Tensor:
        return super().in_window(keys, own[-1:], window) | (keys == own)


class WindowFromLongestRequest(EagerAttention):
    """Counts a decode's window from the batch's `max_seq_len`, as one launch for all requests would."""

    def plan(self, batch: AttentionBatch) -> Plan:
        self.longest = batch.max_seq_len
        return super().plan(batch)

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        seen = super().visible(layer, plan, num_queries, first, length)
        if layer.window is not None and num_queries == 1:
            seen &= (torch.arange(first, length) > self.longest - 1 - layer.window)[None, :]
            seen[:, -1] = True
        return seen


class DropsPartialBlock(EagerAttention):
    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        seen = super().visible(layer, plan, num_queries, first, length)
        whole = length // self.block_size * self.block_size
        if first < whole and num_queries == 1:
            seen = seen & (torch.arange(first, length) < whole)[None, :]
        return seen


class DropsFirstKey(EagerAttention):
    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        seen = super().visible(layer, plan, num_queries, first, length)
        return seen & ((torch.arange(first, length) > 0)[None, :] | (torch.arange(num_queries)[:, None] + length == 1))


class FiniteMask(EagerAttention):
    """Masks with -10000, which is not far below the scores of large activations."""

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(layer, query, keys).masked_fill(~seen, -1e4)
        weights, lse = self.softmax(scores, sinks)
        return self.combine(weights, self.expand(layer, values)), lse


class AdditiveMask(EagerAttention):
    """Adds -10000 to the scores of masked keys."""

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(layer, query, keys)
        weights, lse = self.softmax(scores - 1e4 * (~seen).float(), sinks)
        return self.combine(weights, self.expand(layer, values)), lse


class UniformQueryLength(EagerAttention):
    """Takes the first request's query length for all of the leading requests that `num_decodes` counts wrongly."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.decodes = 0

    def plan(self, batch: AttentionBatch) -> Plan:
        self.decodes = batch.num_decodes
        return super().plan(batch)

    def forward(self, layer: AttentionLayer, *rest: Any, **more: Any) -> torch.Tensor | None:
        query, key, value, cache, plan, out, *sinks = rest
        return super().forward(layer, query, key, value, cache, self.shifted(plan), out, *sinks, **more)

    def shifted(self, plan: Plan) -> Plan:
        """One request more is taken for a decode than there are."""
        starts = list(plan.starts)
        if 0 < self.decodes < len(plan.lengths) and starts[self.decodes + 1] > starts[self.decodes]:
            starts[self.decodes] = starts[self.decodes + 1] - 1
        return evolve(plan, starts=starts)


L1 = Level.NUMERICS

MUTANTS = (
    mutant("causal-hides-own-token", L1, "a query does not see its own key", CausalHidesOwnToken),
    mutant("causal-shows-next-token", L1, "a query sees one key after its own", CausalShowsNextToken),
    mutant("causal-top-left", L1, "several query tokens are aligned with the first keys", CausalTopLeft),
    mutant("causal-by-block", L1, "a query sees all keys of its own block", CausalByBlock),
    mutant("causal-ignored-in-prefill", L1, "no causal mask without a prefix", CausalIgnoredInPrefill),
    mutant("causal-ignored-in-verify", L1, "no causal mask for a few query tokens", CausalIgnoredInVerify),
    mutant("causal-in-encoders", L1, "encoders are masked like decoders", CausalInEncoders),
    mutant("encoder-window-endless", L1, "an encoder's window has no end after the query", EncoderWindowEndless),
    mutant(
        "encoder-keys-by-tokens", L1, "as many of an encoder's keys are stored as there are tokens", EncoderKeysByTokens
    ),
    mutant("images-are-causal", L1, "tokens of an image do not see later ones", ImagesAreCausal),
    mutant("images-see-all", L1, "tokens of an image see all of the request", ImagesSeeAll),
    mutant("images-without-last-token", L1, "tokens of an image do not see its last one", ImagesWithoutLastToken),
    mutant("images-by-first-token", L1, "all tokens see as far ahead as the first one", ImagesByFirstToken),
    mutant("tree-sees-all-nodes", L1, "nodes of a tree see those before them", TreeSeesAllNodes),
    mutant("tree-window-by-slot", L1, "windows count a tree's slots", TreeWindowBySlot),
    mutant("tree-of-first-request", L1, "all requests have the first one's tree", TreeOfFirstRequest),
    mutant("tree-begins-with-queries", L1, "nodes whose keys are stored are taken for known", TreeBeginsWithQueries),
    mutant("window-of-one-less", L1, "a window of W shows W - 1 keys", WindowOfOneLess),
    mutant("window-of-one-more", L1, "a window of W shows W + 1 keys", WindowOfOneMore),
    mutant("window-by-block", L1, "a window begins at the start of a block", WindowByBlock),
    mutant("window-ignored", L1, "there is no window", WindowIgnored),
    mutant("window-ignored-in-decode", L1, "a single query token sees all keys", WindowIgnoredInDecode),
    mutant("window-off-with-prefix", L1, "a chunk sees its whole prefix", WindowOffWithPrefix),
    mutant("window-from-last-query", L1, "all queries have the last one's window", WindowFromLastQuery),
    mutant("window-from-longest", L1, "windows count from the batch's longest", WindowFromLongestRequest),
    mutant("drops-partial-block", L1, "decode skips the last, partly filled block", DropsPartialBlock),
    mutant("drops-first-key", L1, "position 0 is masked", DropsFirstKey),
    mutant("mask-is-finite", L1, "masked scores are -10000", FiniteMask),
    mutant("mask-is-added", L1, "10000 is subtracted from masked scores", AdditiveMask),
    mutant("one-decode-too-many", L1, "num_decodes is taken for one more than it is", UniformQueryLength),
)
