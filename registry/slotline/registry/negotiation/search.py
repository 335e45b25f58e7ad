"""Search over all combinations, in lexicographic order of importance, so that the best plan is deterministic.

Shared variables (dtype pair, cache specs, manager block size, and in each cache group the kernel block size and the
layout) are enumerated. Given them, attention groups are independent of each other. Lexicographic cost vectors add up
group by group. Taking each group's best is therefore the same as trying every combination of backends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from math import lcm

from attrs import define, evolve, field, frozen

from slotline.registry.negotiation.graphs import FULL
from slotline.registry.negotiation.groups import CAPTURED
from slotline.registry.negotiation.measured import clamped
from slotline.registry.negotiation.needs import Pair, Problem, dtype_pairs
from slotline.registry.negotiation.offers import Offer, divisors, kernel_sizes, kv_reasons, offer_of
from slotline.registry.negotiation.request import AUTO, Candidate, GroupRequest

LARGEST_BLOCK = 4096
"""Tokens; `auto` does not look for larger blocks than this or than what a plugin names."""

CRITERIA = (
    "dtype",
    "preference",
    "measured",
    "graphs",
    "cache spec",
    "block size changed",
    "block size distance",
    "priority",
    "cache spec priority",
    "name",
    "cache spec name",
    "block size",
    "kernel block size",
    "layout",
)
"""The places of `Cost`, most important first."""

Cost = tuple[
    int, int, int, int, int, int, int, int, int, tuple[str, ...], tuple[str, ...], int, int, tuple[object, ...]
]
Kinds = dict[str, Candidate]
CacheKey = tuple[str, int | None, int | None]
"""(name of the spec, window and chunk where the spec makes use of them); ("", index, None) for a group without a
cache."""


@frozen(kw_only=True)
class CachePart:
    """Decision for the attention groups of one cache group.

    Attributes:
        key: identity of the cache group.
        members: indices into the request's groups.
        spec: the cache spec, None for layers without a cache.
        kernel_block_size, layout: common to the members.
        offers: the chosen offer of each member.
    """

    key: CacheKey
    members: tuple[int, ...]
    spec: Candidate | None
    kernel_block_size: int
    layout: str
    offers: tuple[Offer, ...]


@frozen(kw_only=True)
class Solution:
    """Feasible combination and its cost.

    Attributes:
        before: the block size of the same choices without the backends' preferences. 0 if these changed nothing.
    """

    pair: Pair
    block_size: int
    specs: Kinds
    parts: tuple[CachePart, ...]
    cost: Cost
    before: int = 0

    def offer(self, index: int) -> Offer:
        """Return the chosen offer of the group of that index."""
        part = self.part(index)
        return part.offers[part.members.index(index)]

    def part(self, index: int) -> CachePart:
        """Return the cache group that the group of that index belongs to."""
        return next(part for part in self.parts if index in part.members)


_PartCost = tuple[int, int, int, int, tuple[str, ...], int, tuple[object, ...]]


@define
class Search:
    """Search for one problem, with every group compared with every candidate once.

    Attributes:
        ranked_by: group name -> label of the plugin that ordered its candidates.
    """

    problem: Problem
    _offers: dict[Pair, list[list[Offer]]] = field(factory=dict, init=False)
    _specs: dict[str, list[Candidate]] = field(factory=dict, init=False)
    ranked_by: dict[str, str] = field(factory=dict, init=False)

    def offers(self, pair: Pair) -> list[list[Offer]]:
        """Return all offers by group, refused ones included, in the candidates' order."""
        if pair not in self._offers:
            problem = self.problem
            self._offers[pair] = [
                self._ranked(
                    group,
                    _tied([offer_of(problem, group, candidate, pair) for candidate in problem.candidates_for(group)]),
                )
                for group in problem.request.groups
            ]
        return self._offers[pair]

    def _ranked(self, group: GroupRequest, offers: list[Offer]) -> list[Offer]:
        """Return the offers of a group with their index in a plugin's order, if there is one."""
        names = tuple(offer.candidate.name for offer in offers if not offer.reasons)
        ranking = self.problem.rank("attention", group.name, names) if len(names) > 1 else None
        if ranking is None:
            return offers
        self.ranked_by[group.name] = ranking.label
        return [evolve(offer, ranking=ranking.place(offer.candidate.name)) for offer in offers]

    def specs(self, kind: str) -> list[Candidate]:
        """Return the cache specs that may hold a kind."""
        if kind not in self._specs:
            problem = self.problem
            self._specs[kind] = [item for item in problem.kv_specs if not kv_reasons(problem, kind, item)]
        return self._specs[kind]

    def best(
        self, forced: Mapping[int, Candidate] | None = None, spec: tuple[str, Candidate] | None = None
    ) -> Solution | None:
        """Return the best solution, or None.

        Args:
            forced: group index -> the candidate that it must take, to determine the cost of that choice.
            spec: (kind, the cache spec that it must take), for the same purpose.
        """
        for rank, pair in enumerate(dtype_pairs(self.problem)):
            viable = self._viable(pair, forced or {})
            if not all(viable):
                continue
            solutions = self._solutions(rank, pair, viable, spec)
            best = min(solutions, key=lambda solution: solution.cost, default=None)
            if best is not None:
                return self._in_preferred_blocks(rank, best)
        return None

    def _in_preferred_blocks(self, rank: int, solution: Solution) -> Solution:
        """Return the same choices with the nearest block size that more of the chosen backends prefer, if there is one.

        Preferences are considered after everything else, so that they never change the choice of backends.
        """
        request = self.problem.request
        if request.block_size.value != AUTO or request.timed_block_size or not unmet(solution):
            return solution
        offers = dict(chosen(solution))
        viable = self._viable(solution.pair, {index: offer.candidate for index, offer in offers.items()})
        wanted = {size for offer in offers.values() for align, _ in offer.preferred for size in _named(align)}
        found = [
            other
            for size in self._block_sizes(viable, wanted)
            if all(item.capabilities.block_sizes.refusal(size) is None for item in solution.specs.values())
            for other in self._combine(rank, solution.pair, size, solution.specs, viable)
        ]
        best = min([solution, *found], key=lambda other: (len(unmet(other)), other.cost))
        if best is solution:
            return solution
        cost = (*best.cost[:5], *solution.cost[5:7], *best.cost[7:])  # a preference costs nothing
        return evolve(best, cost=cost, before=solution.block_size)

    def _viable(self, pair: Pair, forced: Mapping[int, Candidate]) -> list[list[Offer]]:
        return [
            sorted(
                (o for o in offers if not o.reasons and (index not in forced or o.candidate is forced[index])),
                key=lambda offer: offer.order,
            )
            for index, offers in enumerate(self.offers(pair))
        ]

    def _solutions(
        self, rank: int, pair: Pair, viable: list[list[Offer]], spec: tuple[str, Candidate] | None
    ) -> Iterator[Solution]:
        kinds = self.problem.kinds
        choices = [[spec[1]] if spec is not None and spec[0] == kind else self.specs(kind) for kind in kinds]
        sizes = self._block_sizes(viable)
        for held in product(*choices):
            specs = dict(zip(kinds, held, strict=True))
            for size in sizes:
                if all(item.capabilities.block_sizes.refusal(size) is None for item in held):
                    yield from self._combine(rank, pair, size, specs, viable)

    def _combine(self, rank: int, pair: Pair, size: int, specs: Kinds, viable: list[list[Offer]]) -> Iterator[Solution]:
        for narrowed in self._captured_somewhere(viable):
            parts, costs = [], []
            for key, members in self._cache_groups(specs).items():
                spec = specs.get(self.problem.request.groups[members[0]].kv_kind) if key[0] else None
                found = self._best_part(key, members, spec, size, narrowed)
                if found is None:
                    break
                costs.append(found[0])
                parts.append(found[1])
            else:
                cost = self._cost(rank, size, specs, costs)
                yield Solution(pair=pair, block_size=size, specs=specs, parts=tuple(parts), cost=cost)

    def _captured_somewhere(self, viable: list[list[Offer]]) -> Iterator[list[list[Offer]]]:
        """Yield the offers with each group in turn required to be captured.

        Explicit `full` needs at least one captured group.
        """
        if not must_capture(self.problem):
            yield viable
            return
        for index in range(len(viable)):
            capturable = [offer for offer in viable[index] if captures(offer)]
            yield [*viable[:index], capturable, *viable[index + 1 :]]

    def _cache_groups(self, specs: Kinds) -> dict[CacheKey, tuple[int, ...]]:
        groups: dict[CacheKey, list[int]] = {}
        for index, group in enumerate(self.problem.request.groups):
            groups.setdefault(cache_key(group, specs, index), []).append(index)
        return {key: tuple(members) for key, members in groups.items()}

    def _best_part(
        self, key: CacheKey, members: tuple[int, ...], spec: Candidate | None, size: int, viable: list[list[Offer]]
    ) -> tuple[_PartCost, CachePart] | None:
        pools = [viable[index] for index in members]
        splittable = spec is None or bool(spec.capabilities.splittable.refusal(True) is None)
        aligns = [align for pool in pools for offer in pool for align in offer.aligns]
        kernels = [size, *(divisors(size, aligns) if splittable else ())]
        layouts = self._layouts(pools)
        best: tuple[_PartCost, CachePart] | None = None
        for (rank, kernel), layout in product(enumerate(kernels), layouts):
            offers = _first_fits(pools, kernel, layout)
            if offers is None:
                continue
            cost = _part_cost(offers, rank, layout)
            if best is None or cost < best[0]:
                part = CachePart(
                    key=key, members=members, spec=spec, kernel_block_size=kernel, layout=layout, offers=offers
                )
                best = (cost, part)
        return best

    def _layouts(self, pools: Sequence[Sequence[Offer]]) -> list[str]:
        asked = self.problem.request.layout.value
        if asked != AUTO and self.problem.insists("attention.layout"):
            return [asked]
        return sorted({layout for pool in pools for offer in pool for layout in offer.layouts})

    def _block_sizes(self, viable: list[list[Offer]], more: Collection[int] = ()) -> list[int]:
        """Return the manager block sizes to try: the requested size, or the usual and other suitable sizes.

        `more` are additional sizes.
        """
        request = self.problem.request
        asked = request.block_size.value
        if isinstance(asked, int) and self.problem.insists("cache.block_size"):
            return [asked]
        usual = asked if isinstance(asked, int) else request.default_block_size
        aligns = [align for offers in viable for offer in offers for align in offer.aligns]
        aligns += [item.capabilities.block_sizes for kind in self.problem.kinds for item in self.specs(kind)]
        return common_multiples({usual}, {*more, *(size for align in aligns for size in _named(align))})

    def _cost(self, rank: int, size: int, specs: Kinds, parts: Sequence[_PartCost]) -> Cost:
        usual = self.problem.request.block_size.value
        usual = usual if isinstance(usual, int) else self.problem.request.default_block_size
        held = list(specs.items())
        return (
            rank,
            sum(cost[0] for cost in parts),
            sum(cost[1] for cost in parts),
            sum(cost[2] for cost in parts),
            sum(not is_exact(item, kind) for kind, item in held)
            + sum(self.loses_prefix_caching(item) for _, item in held),
            int(size != usual),
            abs(size - usual),
            sum(cost[3] for cost in parts),
            -sum(item.capabilities.priority for _, item in held),
            tuple(name for cost in parts for name in cost[4]),
            tuple(item.name for _, item in held),
            size,
            sum(cost[5] for cost in parts),
            tuple(cost[6] for cost in parts),
        )

    def loses_prefix_caching(self, spec: Candidate) -> bool:
        """Return True if prefix caching was requested and this spec does not support it."""
        return self.problem.request.prefix_caching.value and spec.capabilities.prefix_caching.refusal(True) is not None


def must_capture(problem: Problem) -> bool:
    """Return True if graphs of all batches were requested explicitly, on a device that has graphs."""
    request = problem.request
    asked = request.graphs.value == FULL and request.graphs.explicit and problem.insists("graphs.mode")
    return asked and bool(request.device.graphs.support) and bool(request.groups)


def chosen(solution: Solution) -> list[tuple[int, Offer]]:
    """Return the groups by index with their chosen offers."""
    return sorted(
        (pair for part in solution.parts for pair in zip(part.members, part.offers, strict=True)),
        key=lambda pair: pair[0],
    )


def unmet(solution: Solution) -> list[tuple[int, Offer]]:
    """Return the groups whose backend prefers another block size."""
    return [
        (index, offer)
        for index, offer in chosen(solution)
        if (part := solution.part(index)).spec is not None and not offer.prefers_block(part.kernel_block_size)
    ]


def captures(offer: Offer) -> bool:
    """Return True if any phase runs inside the graph."""
    return any(state == CAPTURED for _, state in offer.graphs)


def is_exact(spec: Candidate, kind: str) -> bool:
    """Return True if a spec holds a kind without waste."""
    return spec.capabilities.exact_kinds.refusal(kind) is None


def cache_key(group: GroupRequest, specs: Kinds, index: int) -> CacheKey:
    """Return the identity of a group's cache group.

    Layers share a block table if one spec frees the same blocks for all.
    """
    if not group.has_cache:
        return ("", index, None)
    spec = specs[group.kv_kind]
    exact = is_exact(spec, group.kv_kind)
    return (spec.name, group.layer.window if exact else None, group.layer.chunk if exact else None)


def common_multiples(start: set[int], sizes: set[int]) -> list[int]:
    """Return least common multiples of `sizes` and `start` up to a bound: start first, then upwards, then downwards."""
    bound = max(LARGEST_BLOCK, *start, *sizes) if sizes else LARGEST_BLOCK
    found = set(start) | sizes
    frontier = found
    while frontier:
        frontier = {lcm(a, b) for a in frontier for b in sizes if lcm(a, b) <= bound} - found
        found = found | frontier
    usual = min(start)
    return [
        usual,
        *sorted(size for size in found if size > usual),
        *sorted((s for s in found if s < usual), reverse=True),
    ]


def _tied(offers: list[Offer]) -> list[Offer]:
    """Return the offers of one group, with costs that differ less than the noise set equal."""
    usable = [offer for offer in offers if not offer.reasons]
    costs = dict(zip(map(id, usable), clamped([(offer.measured, offer.noise) for offer in usable]), strict=True))
    return [evolve(offer, measured=costs.get(id(offer), offer.measured)) for offer in offers]


def _named(align: object) -> set[int]:
    exact = getattr(align, "exact", ())
    base = getattr(align, "multiple_of", None)
    return {size for size in (*exact, base) if size is not None and size > 0}


def _first_fits(pools: Sequence[Sequence[Offer]], kernel: int, layout: str) -> tuple[Offer, ...] | None:
    """Return the best offer of each group that accepts this kernel block and layout. None if a group has none."""
    offers = []
    for pool in pools:
        fit = next((offer for offer in pool if layout in offer.layouts and offer.accepts_block(kernel)), None)
        if fit is None:
            return None
        offers.append(fit)
    return tuple(offers)


def _part_cost(offers: Sequence[Offer], kernel_rank: int, layout: str) -> _PartCost:
    return (
        sum(offer.preference for offer in offers),
        sum(offer.measured for offer in offers),
        sum(offer.loss for offer in offers),
        -sum(offer.candidate.capabilities.priority for offer in offers),
        tuple(offer.candidate.name for offer in offers),
        kernel_rank,
        (sum(offer.layouts.index(layout) for offer in offers), layout),
    )


__all__ = [
    "CRITERIA",
    "CachePart",
    "Search",
    "Solution",
    "captures",
    "chosen",
    "is_exact",
    "kernel_sizes",
    "must_capture",
    "unmet",
]
