"""Mutants whose attention is right, and what they tell of it is not."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.contracts.attention import AttentionLayer, KVCache
from slotline.testing.check import Level
from slotline.testing.mutants.attention.making import mutant
from slotline.testing.reference.attention.backend import EagerAttention


class Asked(EagerAttention):
    """Differs only while it is asked for scores."""

    asked = False

    def attention_scores(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: KVCache,
        blocks: torch.Tensor,
        num_keys: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.asked = True
        try:
            return super().attention_scores(layer, query, cache, blocks, num_keys, sinks)
        finally:
            self.asked = False


class SumOfQueries(EagerAttention):
    def mean_of_window(self, layer: AttentionLayer, weights: torch.Tensor) -> torch.Tensor:
        return super().mean_of_window(layer, weights) * weights.shape[1]


class LargestHead(EagerAttention):
    def mean_of_window(self, layer: AttentionLayer, weights: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = weights.unflatten(0, (layer.num_kv_heads, -1)).amax(1).mean(1).T
        return found


class InterleavedHeads(EagerAttention):
    def mean_of_window(self, layer: AttentionLayer, weights: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = weights.unflatten(0, (-1, layer.num_kv_heads)).mean((0, 2)).T
        return found


class ByHeadFirst(EagerAttention):
    def mean_of_window(self, layer: AttentionLayer, weights: torch.Tensor) -> torch.Tensor:
        return super().mean_of_window(layer, weights).T


class HalfPrecision(EagerAttention):
    def mean_of_window(self, layer: AttentionLayer, weights: torch.Tensor) -> torch.Tensor:
        return super().mean_of_window(layer, weights).half()


class LastQueryOnly(EagerAttention):
    def mean_of_window(self, layer: AttentionLayer, weights: torch.Tensor) -> torch.Tensor:
        return super().mean_of_window(layer, weights[:, -1:])


class MeanOfSeen(EagerAttention):
    def mean_of_window(self, layer: AttentionLayer, weights: torch.Tensor) -> torch.Tensor:
        seen = (weights > 0).sum(1).clamp(min=1)  # [H, n]
        found: torch.Tensor = (weights.sum(1) / seen).unflatten(0, (layer.num_kv_heads, -1)).mean(1).T
        return found


class SeesLater(Asked):
    def not_after(self, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return (keys >= 0) & (own >= 0) if self.asked else super().not_after(keys, own)


class NotItself(Asked):
    def not_after(self, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return (keys < own) | (keys == 0) if self.asked else super().not_after(keys, own)


class WithoutWindow(Asked):
    def in_window(self, keys: torch.Tensor, own: torch.Tensor, window: int) -> torch.Tensor:
        return super().in_window(keys, own, window + 1000 * self.asked)


class WithoutCap(Asked):
    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.asked else super().cap(layer, scores)


class WithoutSinks(Asked):
    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().softmax(scores, None if self.asked else sinks)


class BlocksInOrder(EagerAttention):
    def attention_scores(self, layer: AttentionLayer, query: torch.Tensor, cache: KVCache, *rest: Any) -> torch.Tensor:
        return super().attention_scores(layer, query, cache, rest[0].sort().values, *rest[1:])


class ZeroesTheCache(EagerAttention):
    def attention_scores(self, layer: AttentionLayer, query: torch.Tensor, cache: KVCache, *rest: Any) -> torch.Tensor:
        found = super().attention_scores(layer, query, cache, *rest)
        cache.key[rest[0][-1]] = 0
        return found


class ScalesTheQuery(EagerAttention):
    def attention_scores(self, layer: AttentionLayer, query: torch.Tensor, cache: KVCache, *rest: Any) -> torch.Tensor:
        found = super().attention_scores(layer, query, cache, *rest)
        query.mul_(layer.scale)
        return found


def _mutant(name: str, summary: str, factory: Any) -> Any:
    return mutant(name, Level.NUMERICS, summary, factory)


MUTANTS = (
    _mutant("scores-sum", "scores are summed over the queries", SumOfQueries),
    _mutant("scores-largest-head", "scores are the largest of a group's heads", LargestHead),
    _mutant("scores-interleaved", "scores take query heads by turns for KV heads", InterleavedHeads),
    _mutant("scores-by-head", "scores have heads first", ByHeadFirst),
    _mutant("scores-half", "scores are float16", HalfPrecision),
    _mutant("scores-last-query", "scores are those of the last query", LastQueryOnly),
    _mutant("scores-mean-of-seen", "scores count only the queries that see a key", MeanOfSeen),
    _mutant("scores-later", "scores of queries see later keys", SeesLater),
    _mutant("scores-not-itself", "scores leave out a query's own key", NotItself),
    _mutant("scores-no-window", "scores pass over the window", WithoutWindow),
    _mutant("scores-no-cap", "scores have no soft cap", WithoutCap),
    _mutant("scores-no-sinks", "scores pass over the sinks", WithoutSinks),
    _mutant("scores-sorted-blocks", "scores read blocks in ascending order", BlocksInOrder),
    _mutant("scores-write", "asking for scores clears the last block", ZeroesTheCache),
    _mutant("scores-query", "asking for scores changes the query", ScalesTheQuery),
)
