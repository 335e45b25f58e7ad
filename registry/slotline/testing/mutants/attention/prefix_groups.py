"""Mutants that get prefixes of groups of requests wrong, and a right backend that serves them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen

from slotline.registry.capability import Flag
from slotline.registry.contracts.attention import AttentionBatch, AttentionLayer, KVCache
from slotline.registry.contracts.prefix_groups import PrefixGroups
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.attention.cascade import CascadeAttention, CascadePlan
from slotline.testing.mutants.attention.making import mutant, offer
from slotline.testing.reference.attention.backend import EagerAttention, Plan

Part = tuple[torch.Tensor, Plan, int]
"""Query tokens [n], a plan of one request for them, and the first key."""


@frozen(eq=False, kw_only=True)
class GroupsPlan(CascadePlan):
    """Plan with the parts of each request and of each segment."""

    own: tuple[Part, ...] = ()
    segments: tuple[Part, ...] = ()


class GroupAttention(CascadeAttention):
    """Each segment for the query tokens of its group at once, then request by request the rest, merged by LSE."""

    begin = 0

    def plan(self, batch: AttentionBatch) -> Any:
        plan = super().plan(batch)
        if (shared := batch.prefix_groups) is None:
            return plan
        fields = (plan.starts, plan.lengths, plan.block_table, plan.slot_mapping, plan.causal)
        return GroupsPlan(*fields, own=tuple(self.own(plan, shared)), segments=tuple(self.segments(plan, shared)))

    def own(self, plan: Plan, shared: PrefixGroups) -> Iterator[Part]:
        """Return the part of each request that has keys."""
        for request, begin in enumerate(self.begins(shared)):
            first, end = plan.starts[request : request + 2]
            if plan.lengths[request] and end > first:
                table = plan.block_table[request : request + 1]
                part = Plan([0, end - first], [plan.lengths[request]], table, plan.slot_mapping, plan.causal)
                yield torch.arange(first, end), part, begin

    def begins(self, shared: PrefixGroups) -> list[int]:
        """Return the first key of each request's own part."""
        found: list[int] = shared.own.tolist()
        return found

    def segments(self, plan: Plan, shared: PrefixGroups) -> Iterator[Part]:
        """Return the part of each segment that has query tokens."""
        bounds = shared.starts.tolist()
        for place, (request, first, end, level) in enumerate(shared.segments.tolist()):
            tokens = self.tokens(shared, bounds[place], bounds[place + 1])
            if len(tokens) and level < self.levels:
                request = self.table_of(request)
                table = plan.block_table[request : request + 1]
                yield tokens, Plan([0, len(tokens)], [end], table, plan.slot_mapping, self.prefix_causal), first

    levels = 9

    def tokens(self, shared: PrefixGroups, begin: int, end: int) -> torch.Tensor:
        """Return the query tokens of a segment."""
        return shared.tokens[begin:end].long()

    def table_of(self, request: int) -> int:
        """Return the request through whose table a segment is read."""
        return request

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
        """All parts in float32, each merged with those before."""
        if not isinstance(plan, GroupsPlan):
            return super().forward(layer, query, key, value, cache, plan, out, sinks)
        total = torch.zeros_like(out, dtype=torch.float32)
        lse, own = (torch.zeros(layer.num_heads, len(out), device=out.device) for _ in range(2))
        for index, (tokens, part, begin) in enumerate((*plan.own, *plan.segments)):
            tokens = tokens.to(out.device)
            result = torch.zeros(len(tokens), *out.shape[1:], device=out.device)
            given = sinks if index < len(plan.own) else self.prefix_sinks(sinks)
            self.begin = begin
            found = EagerAttention.forward(self, layer, query[tokens], key, value, cache, part, result, given)
            assert found is not None
            if index < len(plan.own):
                total[tokens], lse[:, tokens], own[:, tokens] = result, found, found
            else:
                total[tokens], lse[:, tokens] = self.merge(total[tokens], lse[:, tokens], result, found)
        self.begin = 0
        out.copy_(total)
        return self.all_keys(own, lse)

    def all_keys(self, own: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
        """Return the LSE [H, T] of all keys, from those of the own keys and of all parts."""
        return merged


class SegmentsLost(GroupAttention):
    levels = 0


class InnerLevelLost(GroupAttention):
    levels = 1


class OwnFromZero(GroupAttention):
    def begins(self, shared: PrefixGroups) -> list[int]:
        return [0] * len(shared.own)


class InnerFromZero(GroupAttention):
    """An inner segment is read from the first key on, though the outer one has its keys."""

    def segments(self, plan: Plan, shared: PrefixGroups) -> Iterator[Part]:
        return ((tokens, part, 0) for tokens, part, _ in super().segments(plan, shared))


class TableOfTheFirst(GroupAttention):
    """Reads all segments through the first request's table."""

    def table_of(self, request: int) -> int:
        return 0


class NeighboursOfTheFirst(GroupAttention):
    """Takes a group's query tokens to be neighbours."""

    def tokens(self, shared: PrefixGroups, begin: int, end: int) -> torch.Tensor:
        first = int(shared.tokens[begin]) if end > begin else 0
        last = int(shared.tokens[: int(shared.starts[-1])].max())
        return torch.arange(first, min(first + end - begin, last + 1))


class EvenNumbers(GroupAttention):
    """Takes query tokens in pairs, and leaves out the last of an odd number."""

    def tokens(self, shared: PrefixGroups, begin: int, end: int) -> torch.Tensor:
        found = super().tokens(shared, begin, end)
        return found[: max(1, len(found) // 2 * 2)]


class SinkInEachPart(GroupAttention):
    def prefix_sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        return sinks


class GroupsMasked(GroupAttention):
    prefix_causal = True


class GroupsMergedInHalves(GroupAttention):
    def merge(
        self, rest: torch.Tensor, rest_lse: torch.Tensor, shared: torch.Tensor, shared_lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (rest + shared) / 2, torch.logaddexp(rest_lse, shared_lse)


class LseOfOwnKeys(GroupAttention):
    def all_keys(self, own: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
        return own


class FirstGroupsKept(GroupAttention):
    """Keeps the own parts' first keys of the first step."""

    kept: list[int] | None = None

    def begins(self, shared: PrefixGroups) -> list[int]:
        if self.kept is None or len(self.kept) != len(shared.own):
            self.kept = super().begins(shared)
        return self.kept


class LastRunsOn(GroupAttention):
    """The last segment's query tokens go on to the array's end, where a captured shape has room for more."""

    def segments(self, plan: Plan, shared: PrefixGroups) -> Iterator[Part]:
        parts = list(super().segments(plan, shared))
        found, part, first = parts[-1]
        more = shared.tokens[int(shared.starts[-1]) :].long()[:1]
        if len(shared.segments) > len(parts) and len(more):
            found = torch.cat([found, more])
            part = Plan([0, len(found)], part.lengths, part.block_table, part.slot_mapping, part.causal)
        return iter([*parts[:-1], (found, part, first)])


def _mutant(name: str, level: Level, summary: str, factory: type[GroupAttention]) -> Mutant:
    return mutant(name, level, summary, factory, cascade=Flag(True), cascade_prefixes="levels")


L1, L2, L3 = Level.NUMERICS, Level.HOSTILE, Level.STATEFUL

MUTANTS = (
    _mutant("groups-lost", L1, "the segments of groups are not read", SegmentsLost),
    _mutant("groups-inner-level-lost", L1, "segments behind others are not read", InnerLevelLost),
    _mutant("groups-own-from-zero", L1, "a request's segments count again with its own keys", OwnFromZero),
    _mutant("groups-inner-from-zero", L1, "an inner segment begins at the first key", InnerFromZero),
    _mutant("groups-table-of-the-first", L1, "all segments are read through one request's table", TableOfTheFirst),
    _mutant("groups-of-neighbours", L1, "the query tokens of a group are taken to be neighbours", NeighboursOfTheFirst),
    _mutant("groups-of-even-numbers", L1, "the last of an odd number of query tokens is left out", EvenNumbers),
    _mutant("groups-sink-in-each", L1, "a sink counts in each segment", SinkInEachPart),
    _mutant("groups-masked", L1, "segments are masked causally", GroupsMasked),
    _mutant("groups-merged-in-halves", L1, "segments and own keys count equally", GroupsMergedInHalves),
    _mutant("groups-lse-of-own-keys", L1, "the LSE leaves the segments out", LseOfOwnKeys),
    _mutant("groups-last-runs-on", L2, "the last segment takes what lies behind its query tokens", LastRunsOn),
    _mutant(
        "groups-of-the-first-step", L3, "the first step's own keys are kept for its number of requests", FirstGroupsKept
    ),
)

CORRECT = (
    Correct(
        "groups: prefixes of groups of requests at two levels, merged by LSE",
        offer("groups", "prefixes of groups apart", GroupAttention, cascade=Flag(True), cascade_prefixes="levels"),
    ),
)
