"""Mutants that get an edge of attention wrong, and right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.attention import AttentionBatch, AttentionLayer, KVCache
from slotline.registry.contracts.attention_edges import EDGES, AttentionEdges, HeadNorm
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.attention.making import mutant, offer
from slotline.testing.reference.attention.backend import Plan
from slotline.testing.reference.attention.edges import EdgedAttention


class NoRotation(EdgedAttention):
    def rotate(self, states: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        return states


class RotatedTwice(EdgedAttention):
    def rotate(self, states: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        return super().rotate(super().rotate(states, edges), edges)


class RotatedBack(EdgedAttention):
    """Takes the sines with the other sign."""

    def angles(self, edges: AttentionEdges) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        cos, sin = super().angles(edges)
        return cos, [-part for part in sin]


class FirstHalfTwice(EdgedAttention):
    """Takes the angles of the first numbers of pairs for the second ones too."""

    def angles(self, edges: AttentionEdges) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        cos, sin = super().angles(edges)
        return [cos[0], cos[0]], [sin[0], sin[0]]


class Neighbours(EdgedAttention):
    """Pairs neighbours in place of halves."""

    def rotate(self, states: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        size = edges.rotary_size
        order = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))
        turned = super().rotate(torch.cat((states[..., order], states[..., size:]), -1), edges)
        found = turned.clone()
        found[..., order] = turned[..., :size]
        return found


class WholeHead(EdgedAttention):
    """Pairs halves of the whole head, where only a part is rotated."""

    def rotate(self, states: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        half, size = edges.rotary_size // 2, states.shape[-1] // 2
        order = torch.arange(states.shape[-1])
        order[half : 2 * half] = torch.arange(size, size + half)
        order[size : size + half] = torch.arange(half, 2 * half)
        return super().rotate(states[..., order], edges)[..., order.argsort()]


class LastPart(EdgedAttention):
    """Rotates the last numbers of a head in place of the first."""

    def rotate(self, states: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        rest = states.shape[-1] - edges.rotary_size
        return super().rotate(states.roll(-rest, -1), edges).roll(rest, -1)


class QueryOnly(EdgedAttention):
    def key_of(self, key: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        return key


class KeyOnly(EdgedAttention):
    def query_of(self, query: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        return query


class FirstRowOfAll(EdgedAttention):
    """Rotates all tokens by the angles of the first."""

    def angles(self, edges: AttentionEdges) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        cos, sin = super().angles(edges)
        return [part[:1] for part in cos], [part[:1] for part in sin]


class OneRowLate(EdgedAttention):
    """Rotates tokens by the angles of those before them."""

    def angles(self, edges: AttentionEdges) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        cos, sin = super().angles(edges)
        return [part.roll(1, 0) for part in cos], [part.roll(1, 0) for part in sin]


class NormAfterRotation(EdgedAttention):
    def turn(self, states: torch.Tensor, norm: HeadNorm | None, edges: AttentionEdges) -> torch.Tensor:
        found = states.float() if edges.cos is None else self.rotate(states.float(), edges)
        return (found if norm is None else self.norm(found, norm)).to(states.dtype)


class NoNorm(EdgedAttention):
    def norm(self, states: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
        return states


class NormedTwice(EdgedAttention):
    def norm(self, states: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
        return super().norm(super().norm(states, norm), norm)


class QueryNormForBoth(EdgedAttention):
    def key_of(self, key: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        return self.turn(key, edges.query_norm, edges)


class NoOffset(EdgedAttention):
    def weight(self, norm: HeadNorm) -> torch.Tensor:
        return norm.weight.float()


class NoWeight(EdgedAttention):
    def weight(self, norm: HeadNorm) -> torch.Tensor:
        return torch.ones_like(norm.weight, dtype=torch.float32)


class NoEpsilon(EdgedAttention):
    def reciprocal(self, states: torch.Tensor, eps: float) -> torch.Tensor:
        return super().reciprocal(states, 1e-6)


class EpsilonOutside(EdgedAttention):
    """Adds the epsilon to the root in place of the mean square."""

    def reciprocal(self, states: torch.Tensor, eps: float) -> torch.Tensor:
        return 1 / (states.square().mean(-1, keepdim=True).sqrt() + eps)


class CenteredNorm(EdgedAttention):
    """Takes the mean off first, as a layer norm does."""

    def norm(self, states: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
        return super().norm(states - states.mean(-1, keepdim=True), norm)


class NormOverHeads(EdgedAttention):
    """Norms all heads together."""

    def reciprocal(self, states: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.rsqrt(states.square().mean((1, 2), keepdim=True) + eps)


class StoredBefore(EdgedAttention):
    """Stores keys as they came, and attends to those."""

    def key_of(self, key: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        self.came = key
        return super().key_of(key, edges)

    def keep(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        super().keep(layer, getattr(self, "came", key), value, cache, plan)


class NothingStored(EdgedAttention):
    """Leaves the cache to a `write` that does not come."""

    def keep(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        pass


class StoredLate(EdgedAttention):
    """Attends to what the cache has, and then stores, in steps of single tokens."""

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
        edges: AttentionEdges | None = None,
    ) -> torch.Tensor | None:
        self.late: Any = None
        lse = super().forward(layer, query, key, value, cache, plan, out, sinks, edges)
        if self.late is not None:
            self.write(layer, *self.late, cache, plan)
        return lse

    def keep(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        if only_single(plan):
            self.late = key, value
        else:
            super().keep(layer, key, value, cache, plan)


class CounterKept(EdgedAttention):
    """Leaves half of the keys out from the second step of single tokens on, as if a counter had not been reset."""

    steps = 0
    halves = False

    def plan(self, batch: AttentionBatch) -> Plan:
        self.halves = False
        return super().plan(batch)

    def keep(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        super().keep(layer, key, value, cache, plan)
        if only_single(plan):
            self.halves, self.steps = self.steps > 0, self.steps + 1

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        first = super().first_key(layer, num_queries, length)
        return max(first, length // 2) if self.halves else first


def only_single(plan: Plan) -> bool:
    """Return True if every request has one query token."""
    return all(end - start == 1 for start, end in zip(plan.starts, plan.starts[1:], strict=False))


class InPlace(EdgedAttention):
    """Rotates the model's query itself."""

    def query_of(self, query: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        return query.copy_(super().query_of(query, edges))


class RotatedEverAfter(EdgedAttention):
    """Rotates the keys of later calls without edges by what it saw last."""

    last: AttentionEdges | None = None

    def key_of(self, key: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        self.last = edges
        return super().key_of(key, edges)

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        if self.last is not None and self.last.cos is not None and len(self.last.cos) == len(key):
            key, self.last = super().rotate(key.float(), self.last).to(key.dtype), None
        super().write(layer, key, value, cache, plan)

    def keep(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        EdgedAttention.write(self, layer, key, value, cache, plan)


class NoGate(EdgedAttention):
    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return out


class RawGate(EdgedAttention):
    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return out * gate


class SiluGate(EdgedAttention):
    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return out * torch.nn.functional.silu(gate)


class GatedTwice(EdgedAttention):
    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().gated(super().gated(out, gate), gate)


class FirstHeadsGate(EdgedAttention):
    """Gates all heads by the gate of the first."""

    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().gated(out, gate[:, :1])


class RoundedBeforeGate(EdgedAttention):
    """Takes the scales of the output before its gate."""

    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        self.before = out
        return super().gated(out, gate)

    def scales_of(self, groups: torch.Tensor) -> torch.Tensor:
        before = self.__dict__.pop("before", None)
        return super().scales_of(groups if before is None else before.reshape(groups.shape))


class Truncated(EdgedAttention):
    def codes(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (groups / scales).trunc()


class InverseScales(EdgedAttention):
    def scales_of(self, groups: torch.Tensor) -> torch.Tensor:
        return 1 / super().scales_of(groups).clamp_min(1e-6)

    def codes(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return super().codes(groups, 1 / scales)


class OneScaleOfAToken(EdgedAttention):
    def scales_of(self, groups: torch.Tensor) -> torch.Tensor:
        return super().scales_of(groups).amax(1, keepdim=True).expand(groups.shape[:2])


class OneScaleOfAll(EdgedAttention):
    def scales_of(self, groups: torch.Tensor) -> torch.Tensor:
        return super().scales_of(groups).amax().expand(groups.shape[:2])


class SevenBits(EdgedAttention):
    def scales_of(self, groups: torch.Tensor) -> torch.Tensor:
        return groups.abs().amax(2) / 64


class ScalesOfTheHighest(EdgedAttention):
    """Takes the highest number in place of the largest."""

    def scales_of(self, groups: torch.Tensor) -> torch.Tensor:
        return groups.amax(2).clamp_min(0) / 127

    def codes(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return super().codes(groups, scales).clamp(-127, 127)


class ScalesUnsaid(EdgedAttention):
    """Rounds with the scales and keeps them to itself."""

    def give(self, found: torch.Tensor, edges: AttentionEdges, out: torch.Tensor) -> None:
        own = edges if edges.scales is None else evolve(edges, scales=torch.empty_like(edges.scales))
        super().give(found, own, out)
        if edges.scales is not None:
            edges.scales.fill_(1.0)


class ValuesFromTheStart(EdgedAttention):
    """Expands values by the first rows of the weight."""

    def expand_output(self, out: torch.Tensor, expansion: torch.Tensor, plain: int) -> torch.Tensor:
        return torch.einsum("nhr,hvr->nhv", out, expansion[:, : expansion.shape[1] - plain].float())


class FirstHeadsExpansion(EdgedAttention):
    def absorb(self, query: torch.Tensor, expansion: torch.Tensor, plain: int) -> torch.Tensor:
        return super().absorb(query, expansion[:1].expand_as(expansion), plain)


class NoRotaryPart(EdgedAttention):
    """Leaves the rotary part of queries out of scores."""

    def absorb(self, query: torch.Tensor, expansion: torch.Tensor, plain: int) -> torch.Tensor:
        found = super().absorb(query, expansion, plain)
        found[..., found.shape[-1] - (query.shape[-1] - plain) :] = 0
        return found


class ScaledByExpandedHeads(EdgedAttention):
    """Takes a scale of its own, by the size of an expanded head, in place of the layer's."""

    def absorb(self, query: torch.Tensor, expansion: torch.Tensor, plain: int) -> torch.Tensor:
        found = super().absorb(query, expansion, plain)
        factor: float = (found.shape[-1] / query.shape[-1]) ** 0.5
        return found * factor


class PrefixLeftOut(EdgedAttention):
    """Expands the step's own keys alone where a request has many query tokens."""

    expands = False

    def absorb(self, query: torch.Tensor, expansion: torch.Tensor, plain: int) -> torch.Tensor:
        self.expands = True
        return super().absorb(query, expansion, plain)

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        if self.expands and num_queries > 8:
            return length - num_queries
        return super().first_key(layer, num_queries, length)

    def expand_output(self, out: torch.Tensor, expansion: torch.Tensor, plain: int) -> torch.Tensor:
        self.expands = False
        return super().expand_output(out, expansion, plain)


class ByComplexNumbers(EdgedAttention):
    """Rotates pairs as complex numbers where both have the same angle, and rounds after the norm as a model would."""

    def norm(self, states: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
        return super().norm(states, norm).to(norm.weight.dtype).float()

    def rotate(self, states: torch.Tensor, edges: AttentionEdges) -> torch.Tensor:
        half, (cos, sin) = edges.rotary_size // 2, self.angles(edges)
        if not (torch.equal(cos[0], cos[1]) and torch.equal(sin[0], sin[1])):
            return super().rotate(states, edges)
        turned = torch.complex(states[..., :half], states[..., half : 2 * half]) * torch.complex(cos[0], sin[0])
        return torch.cat((turned.real, turned.imag, states[..., 2 * half :]), dim=-1)


class WritesItself(EdgedAttention):
    """Stores new keys in `forward`, in calls without edges too: right if it is declared."""

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
        edges: AttentionEdges | None = None,
    ) -> torch.Tensor | None:
        if edges is None and layer.attention_type != "encoder_only":
            self.write(layer, key, value, cache, plan)
        return super().forward(layer, query, key, value, cache, plan, out, sinks, edges)


OFFER: dict[str, Any] = {"edges": Set(EDGES)}


def _edged(
    name: str, summary: str, factory: Callable[..., Any], level: Level = Level.NUMERICS, **changes: Any
) -> Mutant:
    return mutant(name, level, summary, factory, **{**OFFER, **changes})


MUTANTS = (
    _edged("edges-not-rotated", "neither queries nor keys are rotated", NoRotation),
    _edged("edges-rotated-twice", "queries and keys are rotated twice", RotatedTwice),
    _edged("edges-rotated-back", "sines have the other sign", RotatedBack),
    _edged("edges-first-half-twice", "both numbers of a pair take the angle of the first", FirstHalfTwice),
    _edged("edges-neighbours", "neighbours are pairs, not halves", Neighbours),
    _edged("edges-whole-head", "a partly rotated head has pairs across all of it", WholeHead),
    _edged("edges-last-part", "the last numbers of a partly rotated head are rotated", LastPart),
    _edged("edges-query-only", "keys are neither normed nor rotated", QueryOnly),
    _edged("edges-key-only", "queries are neither normed nor rotated", KeyOnly),
    _edged("edges-first-angle", "all tokens are rotated by the first token's angles", FirstRowOfAll),
    _edged("edges-one-row-late", "tokens are rotated by the angles of those before them", OneRowLate),
    _edged("edges-norm-after-rotation", "heads are normed after they are rotated", NormAfterRotation),
    _edged("edges-not-normed", "heads are not normed", NoNorm),
    _edged("edges-normed-twice", "heads are normed twice", NormedTwice),
    _edged("edges-query-norm-for-both", "keys are normed by the queries' norm", QueryNormForBoth),
    _edged("edges-no-offset", "the norm's offset is left out", NoOffset),
    _edged("edges-no-weight", "the norm's weight is left out", NoWeight),
    _edged("edges-no-epsilon", "the norm has an epsilon of its own", NoEpsilon),
    _edged("edges-epsilon-outside", "the norm's epsilon is added to the root", EpsilonOutside),
    _edged("edges-centered", "the norm takes the mean off", CenteredNorm),
    _edged("edges-norm-over-heads", "all heads of a token are normed together", NormOverHeads),
    _edged("edges-stored-before", "keys are stored before they are normed and rotated", StoredBefore),
    _edged("edges-stored-late", "in a step of single tokens the new key is stored after attention", StoredLate),
    _edged("edges-counter-kept", "the second step of single tokens misses half of the keys", CounterKept,
           Level.STATEFUL),
    _edged("edges-nothing-stored", "a call with edges stores nothing", NothingStored),
    _edged("edges-in-place", "the model's query is rotated in place", InPlace),
    _edged("edges-ever-after", "a call without edges rotates as the one before it", RotatedEverAfter, Level.STATEFUL),
    _edged("edges-not-gated", "the gate is forgotten", NoGate),
    _edged("edges-raw-gate", "the gate has no sigmoid", RawGate),
    _edged("edges-silu-gate", "the gate is a SiLU", SiluGate),
    _edged("edges-gated-twice", "the output is gated twice", GatedTwice),
    _edged("edges-first-heads-gate", "all heads have the gate of the first", FirstHeadsGate),
    _edged("edges-rounded-before-gate", "scales are of the output before its gate", RoundedBeforeGate),
    _edged("edges-truncated", "codes are cut, not rounded", Truncated),
    _edged("edges-inverse-scales", "scales are one over what they should be", InverseScales),
    _edged("edges-scale-of-a-token", "all groups of a token have one scale", OneScaleOfAToken),
    _edged("edges-scale-of-all", "all tokens have one scale", OneScaleOfAll),
    _edged("edges-seven-bits", "codes have seven bits", SevenBits),
    _edged("edges-scales-of-the-highest", "negative numbers do not count for scales", ScalesOfTheHighest),
    _edged("edges-scales-unsaid", "scales are not handed out", ScalesUnsaid),
    _edged("edges-values-from-the-start", "values are expanded by the weight of keys", ValuesFromTheStart),
    _edged("edges-first-heads-expansion", "all heads have the expansion of the first", FirstHeadsExpansion),
    _edged("edges-no-rotary-part", "the rotary part of plain queries is left out", NoRotaryPart),
    _edged("edges-scaled-by-heads", "scores of plain queries have a scale of their own", ScaledByExpandedHeads),
    _edged("edges-prefix-left-out", "long prompts attend to the step's own keys alone", PrefixLeftOut),
    _edged("edges-unknown-name", "an edge is declared that the contract has not", EdgedAttention, Level.CONTRACT,
           edges=Set((*EDGES, "swish"))),
    _edged("edges-any-name", "all edges that there will ever be are declared", EdgedAttention, Level.CONTRACT,
           edges=Set(None)),
    _edged("edges-without-latents", "an expansion is declared without latents", EdgedAttention, Level.CONTRACT,
           mla=Flag(False)),
)  # fmt: skip
CORRECT = (
    Correct(
        "takes all edges, rotates as complex numbers", offer("edged_complex", "complex", ByComplexNumbers, **OFFER)
    ),
    Correct(
        "takes edges, and writes always", offer("edged_writes", "writes", WritesItself, **OFFER, writes_cache=True)
    ),
    Correct("only rotates", offer("edged_rotary", "rotates", EdgedAttention, edges=Set(("rotary",)))),
)
