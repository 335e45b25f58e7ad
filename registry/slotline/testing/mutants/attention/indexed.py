"""Mutants that get an index of keys wrong, and a right one."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.attention import INDEX_INPUTS, AttentionBatch, AttentionLayer, TreeMask
from slotline.registry.contracts.cache_tensors import LATENT_INDEX, CacheTensors
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.attention.making import mutant, offer
from slotline.testing.reference.attention.backend import EagerAttention, Plan
from slotline.testing.reference.attention.index import IndexedAttention


class OneMore(IndexedAttention):
    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        return super().pick(scores, seen, most + 1)


class OneLess(IndexedAttention):
    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        return super().pick(scores, seen, max(1, most - 1) if seen.shape[1] > most else most)


class AllKeys(IndexedAttention):
    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        return seen


class TheLastKeys(IndexedAttention):
    """A window in place of an index."""

    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        return super().pick(torch.arange(seen.shape[1]).expand(seen.shape).float(), seen, most)


class FirstPickedThenMasked(IndexedAttention):
    """Picks among later keys too, and masks them afterwards."""

    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        return super().pick(scores, torch.ones_like(seen), most) & seen


class LastOfEqual(IndexedAttention):
    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        return super().pick(scores.flip(1), seen.flip(1), most).flip(1)


class OwnKeyAlways(IndexedAttention):
    """Adds each query's own key to what is picked."""

    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        own = torch.arange(seen.shape[1])[None, :] == seen.sum(1, keepdim=True) - 1
        return super().pick(scores, seen, most) | own


class PositiveOnly(IndexedAttention):
    """Leaves keys out whose score is not above 0."""

    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        found = super().pick(scores, seen, most)
        return found if seen.shape[1] <= most else found & ((scores > 0) | ~(found & (scores > 0)).any(1, keepdim=True))


class QueriesTogether(IndexedAttention):
    """Lets all queries of a request attend to what the last one picked."""

    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        found = super().pick(scores, seen, most)
        both = found[-1:] & seen
        return torch.where(both.any(1, keepdim=True), both, found)


class NoRectifier(IndexedAttention):
    def index_scores(self, query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qh,qhd,kd->qk", weight.float(), query.float(), keys.float())


class RectifiedSum(IndexedAttention):
    """Cuts the weighted sum at 0 in place of each head's product."""

    def index_scores(self, query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        products = torch.einsum("qhd,kd->qhk", query.float(), keys.float())
        return torch.einsum("qh,qhk->qk", weight.float(), products).clamp_min(0.0)


class NoWeights(IndexedAttention):
    def index_scores(self, query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().index_scores(query, keys, torch.ones_like(weight))


class AbsoluteWeights(IndexedAttention):
    def index_scores(self, query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().index_scores(query, keys, weight.abs())


class SixteenHeads(IndexedAttention):
    """Sums over the first sixteen heads, as a tile that is cut off."""

    def index_scores(self, query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().index_scores(query[:, :16], keys, weight[:, :16])


class SixteenNumbers(IndexedAttention):
    """Multiplies the first sixteen numbers of a head."""

    def index_scores(self, query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().index_scores(query[..., :16], keys[:, :16], weight)


class FirstBlocks(IndexedAttention):
    """Picks among the first 1,024 keys."""

    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        return super().pick(scores, seen & (torch.arange(seen.shape[1]) < 1024), most)


class IndexKeysLate(IndexedAttention):
    """Stores the index's keys one slot further on."""

    def store_index(self, cache: CacheTensors, slots: torch.Tensor, new: torch.Tensor) -> None:
        super().store_index(cache, slots.roll(1), new)


class SharedWithAnother(IndexedAttention):
    """Takes the picks of the first request for all."""

    def shared(self, owner: int) -> torch.Tensor:
        own, first = self.picks[owner, self.request], self.picks[owner, min(r for _, r in self.picks)]
        return own if own.shape != first.shape else first


class SharedNothing(IndexedAttention):
    """Lets layers without an index attend to all keys."""

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        if layer.index_from is not None:
            return EagerAttention.visible(self, layer, plan, num_queries, first, length)
        return super().visible(layer, plan, num_queries, first, length)


class FirstPicksKept(IndexedAttention):
    """Keeps what was picked first for a request of the same number and shape."""

    def plan(self, batch: AttentionBatch) -> Plan:
        kept = dict(self.picks)
        plan = super().plan(batch)
        self.kept = kept | getattr(self, "kept", {})
        return plan

    def shared(self, owner: int) -> torch.Tensor:
        own = super().shared(owner)
        before = getattr(self, "kept", {}).get((owner, self.request), own)
        return before if before.shape == own.shape else own


class TreeIgnored(IndexedAttention):
    def in_tree(self, layer: AttentionLayer, plan: Plan, seen: torch.Tensor, *rest: int) -> torch.Tensor:
        return seen


class TreeMaskedLate(TreeIgnored):
    """Picks among all of a tree's nodes, and masks them afterwards."""

    def among_nodes(self, layer: AttentionLayer, tree: TreeMask, seen: torch.Tensor, *rest: int) -> torch.Tensor:
        return seen & EagerAttention.among_nodes(self, layer, tree, seen.clone(), *rest)


class FewKeysOfTree(IndexedAttention):
    """Lets queries attend to all keys before them where these are not more than are picked, other nodes too."""

    def in_tree(self, layer: AttentionLayer, plan: Plan, seen: torch.Tensor, first: int, length: int) -> torch.Tensor:
        few = length <= (layer.index_topk or 0)
        return seen if few else super().in_tree(layer, plan, seen, first, length)


class ByThreshold(IndexedAttention):
    """Finds the lowest picked score first, then fills up with equal ones: right, in another way."""

    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        if seen.shape[1] <= most:
            return seen
        masked = scores.masked_fill(~seen, -torch.inf)
        lowest = masked.topk(most, dim=1).values[:, -1:]
        above, equal = masked > lowest, masked == lowest
        left = most - above.sum(1, keepdim=True)
        return (above | (equal & (equal.cumsum(1) <= left))) & seen


OFFER: dict[str, Any] = {
    "mla": Flag(True),
    "index_topk": Flag(True),
    "layer_inputs": Set(INDEX_INPUTS),
    "cache_formats": Set((LATENT_INDEX,)),
    "attention_types": Set(("decoder",)),
}


def _indexed(name: str, level: Level, summary: str, kind: type[IndexedAttention]) -> Mutant:
    return mutant(f"index-{name}", level, summary, kind, **OFFER)


L1, L3 = Level.NUMERICS, Level.STATEFUL

MUTANTS = (
    _indexed("one-more", L1, "one key more is picked", OneMore),
    _indexed("one-less", L1, "one key less is picked", OneLess),
    _indexed("all-keys", L1, "every key is picked", AllKeys),
    _indexed("the-last", L1, "the last keys are picked", TheLastKeys),
    _indexed("masked-late", L1, "later keys take part, and are masked after the picking", FirstPickedThenMasked),
    _indexed("last-of-equal", L1, "of equal scores the higher positions are picked", LastOfEqual),
    _indexed("own-always", L1, "each query's own key is added", OwnKeyAlways),
    _indexed("positive-only", L1, "keys of no positive score are left out", PositiveOnly),
    _indexed("queries-together", L1, "all queries of a request have the picks of the last", QueriesTogether),
    _indexed("no-rectifier", L1, "negative products count", NoRectifier),
    _indexed("rectified-sum", L1, "the sum is cut at 0 in place of the products", RectifiedSum),
    _indexed("no-weights", L1, "heads have no weights", NoWeights),
    _indexed("absolute-weights", L1, "negative weights count as positive", AbsoluteWeights),
    _indexed("sixteen-heads", L1, "heads beyond the sixteenth are left out", SixteenHeads),
    _indexed("sixteen-numbers", L1, "numbers of a head beyond the sixteenth are left out", SixteenNumbers),
    _indexed("first-1024", L1, "keys beyond the first 1,024 are not picked", FirstBlocks),
    _indexed("keys-late", L1, "the index's keys are stored at each other's slots", IndexKeysLate),
    _indexed("tree-ignored", L1, "nodes of a tree attend to those before them", TreeIgnored),
    _indexed(
        "tree-masked-late", L1, "nodes of other paths take part, and are masked after the picking", TreeMaskedLate
    ),
    _indexed("tree-of-few-keys", L1, "a tree's mask is left out where all keys are picked", FewKeysOfTree),
    _indexed("shared-with-another", L1, "all requests share the first one's picks", SharedWithAnother),
    _indexed("shared-nothing", L1, "layers that use picks attend to all keys", SharedNothing),
    _indexed("first-picks-kept", L3, "layers use the picks of an earlier step", FirstPicksKept),
)
CORRECT = (Correct("picks by the lowest score", offer("indexed", "by a threshold", ByThreshold, **OFFER)),)
