"""Mutants that bias scores by a wrong distance, and a right backend that does it by the right one."""

from __future__ import annotations

import torch
from attrs import evolve

from slotline.registry.capability import Flag
from slotline.registry.contracts.attention import AttentionLayer, TreeMask
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.attention.making import mutant, offer
from slotline.testing.reference.attention.backend import EagerAttention, Plan


class BiasedAttention(EagerAttention):
    """ALiBi as its paper has it (Press et al. 2021, arXiv 2108.12409): a bias on one request's scores at a time."""

    places = torch.empty(0)
    """[n], the places in a text of the keys of the request in turn."""

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        """Return the mask, and record the positions of these keys."""
        self.places = torch.arange(first, length)
        return super().visible(layer, plan, num_queries, first, length)

    def among_nodes(
        self, layer: AttentionLayer, tree: TreeMask, seen: torch.Tensor, nodes: int, first: int, length: int
    ) -> torch.Tensor:
        """Return the mask among a tree's nodes, and record their positions."""
        self.places[-nodes:] = self.node_positions(tree, nodes, length - nodes)
        return super().among_nodes(layer, tree, seen, nodes, first, length)

    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return scores [H, q, n] float32 with their bias after the soft cap."""
        return super().scores(layer, query, keys) + self.bias(layer, len(query)).to(keys.device)

    def bias(self, layer: AttentionLayer, num_queries: int) -> torch.Tensor:
        """[H, q, n], the head's slope times the distance."""
        if layer.alibi_slopes is None:
            return torch.zeros(())
        return torch.tensor(layer.alibi_slopes)[:, None, None] * self.distance(num_queries)

    def distance(self, num_queries: int) -> torch.Tensor:
        """[q, n], the key's place less the query's."""
        return self.places[None, :] - self.places[-num_queries:, None]


class Ignored(BiasedAttention):
    def bias(self, layer: AttentionLayer, num_queries: int) -> torch.Tensor:
        return torch.zeros(())


class OppositeSign(BiasedAttention):
    def bias(self, layer: AttentionLayer, num_queries: int) -> torch.Tensor:
        return -super().bias(layer, num_queries)


class OtherHead(BiasedAttention):
    def bias(self, layer: AttentionLayer, num_queries: int) -> torch.Tensor:
        return super().bias(layer, num_queries).roll(1, 0) if layer.alibi_slopes else torch.zeros(())


class SlopeOfTheGroup(BiasedAttention):
    """All query heads of a KV head have the first one's slope."""

    def bias(self, layer: AttentionLayer, num_queries: int) -> torch.Tensor:
        group = layer.num_heads // layer.num_kv_heads
        slopes = layer.alibi_slopes and tuple(layer.alibi_slopes[h // group * group] for h in range(layer.num_heads))
        return super().bias(evolve(layer, alibi_slopes=slopes), num_queries)


class BeforeTheCap(BiasedAttention):
    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self.cap(layer, super().scores(evolve(layer, soft_cap=None), query, keys))


class Scaled(BiasedAttention):
    """Adds the bias before scores are scaled, as Falcon's slopes are counted."""

    def bias(self, layer: AttentionLayer, num_queries: int) -> torch.Tensor:
        return super().bias(layer, num_queries) * layer.scale


class FromTheFirstToken(BiasedAttention):
    """Counts from position 0: no weight changes, and the LSE does."""

    def distance(self, num_queries: int) -> torch.Tensor:
        return self.places[None, :].expand(num_queries, -1)


class OfTheLastQuery(BiasedAttention):
    """A decode's distances for every query of a chunk."""

    def distance(self, num_queries: int) -> torch.Tensor:
        return (self.places - self.places[-1])[None, :].expand(num_queries, -1)


class InTheStep(BiasedAttention):
    """Queries are counted from the step's first token, not from the request's."""

    def distance(self, num_queries: int) -> torch.Tensor:
        return -(self.places[None, :] - torch.arange(num_queries)[:, None]).abs()


class BySlot(BiasedAttention):
    """A tree's nodes count from where they lie in the cache."""

    def distance(self, num_queries: int) -> torch.Tensor:
        count = len(self.places)
        return torch.arange(count)[None, :] - torch.arange(count - num_queries, count)[:, None]


class TableAttention(BiasedAttention):
    """A learned bias by head and distance (Raffel et al. 2020, arXiv 1910.10683)."""

    def bias(self, layer: AttentionLayer, num_queries: int) -> torch.Tensor:
        """[H, q, n], the head's number for the distance."""
        if layer.position_bias is None:
            return torch.zeros(())
        table = torch.tensor(layer.position_bias)
        return table[:, self.place(num_queries, table.shape[1])]

    def place(self, num_queries: int, count: int) -> torch.Tensor:
        """[q, n], the places in a table of `count` distances."""
        return (-self.distance(num_queries)).clamp(0, count - 1)


class OneTooFar(TableAttention):
    def place(self, num_queries: int, count: int) -> torch.Tensor:
        return (1 - self.distance(num_queries)).clamp(0, count - 1)


class NoneBeyond(TableAttention):
    """Keys beyond the table have the bias of the key at the query's place."""

    def place(self, num_queries: int, count: int) -> torch.Tensor:
        place = -self.distance(num_queries)
        return torch.where(place >= count, 0, place.clamp(min=0))


def _mutant(name: str, summary: str, factory: type[BiasedAttention]) -> Mutant:
    return mutant(f"alibi-{name}", Level.NUMERICS, summary, factory, alibi=Flag(True))


MUTANTS = (
    _mutant("ignored", "scores have no bias", Ignored),
    _mutant("opposite-sign", "far keys gain what they should lose", OppositeSign),
    _mutant("of-other-head", "each head has its neighbour's slope", OtherHead),
    _mutant("of-the-group", "query heads of a KV head share a slope", SlopeOfTheGroup),
    _mutant("before-the-cap", "the bias is capped with the scores", BeforeTheCap),
    _mutant("scaled", "the bias is scaled like scores", Scaled),
    _mutant("from-the-first-token", "the LSE counts distances from position 0", FromTheFirstToken),
    _mutant("of-the-last-query", "all queries of a chunk have the last one's distances", OfTheLastQuery),
    _mutant("in-the-step", "distances ignore a request's cached tokens", InTheStep),
    _mutant("by-slot", "a tree's nodes are as far apart as their slots", BySlot),
    *(
        mutant(f"position-bias-{name}", Level.NUMERICS, summary, factory, position_bias=Flag(True))
        for name, summary, factory in (
            ("ignored", "scores have no bias", Ignored),
            ("one-too-far", "each distance counts as the next one", OneTooFar),
            ("none-beyond", "distances beyond the table count as none", NoneBeyond),
        )
    ),
)

CORRECT = (
    Correct(
        "position bias: a table on the scores",
        offer("position_bias", "scores with a table", TableAttention, position_bias=Flag(True)),
    ),
    Correct("alibi: a bias on the scores", offer("alibi", "scores with a bias", BiasedAttention, alibi=Flag(True))),
)
