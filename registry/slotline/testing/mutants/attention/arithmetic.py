"""Mutants that compute something else from the right keys."""

from __future__ import annotations

import torch
from attrs import evolve

from slotline.registry.contracts.attention import AttentionLayer
from slotline.testing.check import Level
from slotline.testing.mutants.attention.correct import SplitAttention, StreamingAttention, finite
from slotline.testing.mutants.attention.making import mutant
from slotline.testing.reference.attention.backend import EagerAttention

# --- heads


class InterleavedGroups(EagerAttention):
    def expand(self, layer: AttentionLayer, heads: torch.Tensor) -> torch.Tensor:
        return heads.float().repeat(1, layer.num_heads // layer.num_kv_heads, 1)


class FirstKVHeadForAll(EagerAttention):
    def expand(self, layer: AttentionLayer, heads: torch.Tensor) -> torch.Tensor:
        return heads.float()[:, :1].expand(-1, layer.num_heads, -1)


class ValuesOfOtherGroup(EagerAttention):
    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return super().combine(weights, values.flip(1))


class HeadSizeOfPowerOfTwo(EagerAttention):
    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        covered = 1 << (layer.head_size.bit_length() - 1)
        return super().scores(layer, query[:, :, :covered], keys[:, :, :covered])


class ValueHeadOfKeySize(EagerAttention):
    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = super().combine(weights, values)
        out[:, :, self.head_size :] = 0
        return out

    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        self.head_size = layer.head_size
        return super().scores(layer, query, keys)


# --- scores


class NoScale(EagerAttention):
    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().scores(evolve(layer, scale=1.0), query, keys)


class ScaleTwice(EagerAttention):
    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().scores(evolve(layer, scale=layer.scale**2), query, keys)


class ScaleOfHeadSize(EagerAttention):
    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().scores(evolve(layer, scale=layer.head_size**-0.5), query, keys)


class CapBeforeScale(EagerAttention):
    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return super().cap(layer, scores / layer.scale) * layer.scale


class CapIgnored(EagerAttention):
    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return scores


class CapClamps(EagerAttention):
    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return scores if layer.soft_cap is None else scores.clamp(-layer.soft_cap, layer.soft_cap)


class NarrowScores(EagerAttention):
    """Keeps scores in float16, which ends at 65504."""

    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        products = torch.einsum("qhd,khd->hqk", query.float(), self.expand(layer, keys))
        return self.cap(layer, products.half().float() * layer.scale)


class BFloat16Scores(EagerAttention):
    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().scores(layer, query, keys).bfloat16().float()


# --- softmax


class NoPeak(EagerAttention):
    """Exponentials without the maximum taken off overflow."""

    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.exp(scores)
        total = weights.sum(dim=2, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.float())[:, None, None]
        return weights / total, torch.log(total[:, :, 0])


class PeakOfAllHeads(EagerAttention):
    """One maximum for the whole request: rows far below it vanish."""

    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        peak = scores.amax()
        weights = torch.exp(scores - peak)
        total = weights.sum(dim=2, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.float() - peak)[:, None, None]
        return weights / total.clamp(min=1e-37), peak + torch.log(total[:, :, 0])


class HalfSums(EagerAttention):
    """Adds up the output in float16."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(weights.shape[1], *values.shape[1:], dtype=torch.float16, device=values.device)
        for start in range(0, len(values), 8):
            part = slice(start, start + 8)
            out += super().combine(weights[:, :, part], values[part]).half()
        return out.float()


class BFloat16Sums(EagerAttention):
    """Adds up the output in bfloat16."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(weights.shape[1], *values.shape[1:], dtype=torch.bfloat16, device=values.device)
        for start in range(0, len(values), 8):
            part = slice(start, start + 8)
            out += super().combine(weights[:, :, part], values[part]).bfloat16()
        return out.float()


class SinkIgnored(EagerAttention):
    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().softmax(scores, None)


class SinkHasFirstValue(EagerAttention):
    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, lse = super().softmax(scores, sinks)
        weights = weights.clone()
        weights[:, :, 0] += 1 - weights.sum(dim=2)
        return weights, lse


class SinkOfOtherHead(EagerAttention):
    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().softmax(scores, None if sinks is None else sinks.roll(1))


class SinkScaled(EagerAttention):
    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().attend(layer, query, keys, values, seen, None if sinks is None else sinks * layer.scale)


# --- streaming and split keys


class StreamingWithoutRescale(StreamingAttention):
    def carried(self, out: torch.Tensor, shrink: torch.Tensor) -> torch.Tensor:
        return out


class StreamingPeakOfLastBlock(StreamingAttention):
    """Subtracts each block's own maximum: a low block after a high one blows the sums up."""

    def higher(self, peak: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where(scores.amax(dim=2) == -torch.inf, peak, scores.amax(dim=2))


class StreamingSinkEachBlock(StreamingAttention):
    """Adds the sink to the sum with each block instead of once."""

    sink: torch.Tensor | None = None

    def begin(
        self, layer: AttentionLayer, query: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.sink = None if sinks is None else sinks.float()[:, None]
        return super().begin(layer, query, values, sinks)

    def shrink(self, peak: torch.Tensor, higher: torch.Tensor) -> torch.Tensor:
        factor = super().shrink(peak, higher)
        return factor if self.sink is None else factor + torch.exp(self.sink - finite(higher)) * 0.5


class SplitsAveraged(SplitAttention):
    def shares(self, lse: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        seen = (lse > -torch.inf).float()
        return seen / seen.sum(dim=0)


class SplitsMergedInBaseTwo(SplitAttention):
    def shares(self, lse: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        weights = torch.exp2(lse - whole)
        return weights / weights.sum(dim=0)


class SplitSinkEachPart(SplitAttention):
    def with_sink(self, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        return lse if sinks is None else torch.logaddexp(lse, sinks.float()[None, :, None].expand_as(lse))


class SplitDropsRest(SplitAttention):
    """Keys that do not fill a split are left out."""

    def split(self, length: int) -> list[slice]:
        size = max(1, length // self.parts)
        return [slice(start, start + size) for start in range(0, length - size + 1, size)][::-1]


L1 = Level.NUMERICS

MUTANTS = (
    mutant("groups-interleaved", L1, "query head h reads KV head h % Hkv", InterleavedGroups),
    mutant("first-kv-head-for-all", L1, "all query heads read KV head 0", FirstKVHeadForAll),
    mutant("values-of-other-group", L1, "keys of one group, values of another", ValuesOfOtherGroup),
    mutant("head-size-of-power-of-two", L1, "dimensions past a power of two are dropped", HeadSizeOfPowerOfTwo),
    mutant("value-head-of-key-size", L1, "value heads end where key heads do", ValueHeadOfKeySize),
    mutant("scale-missing", L1, "scores are not scaled", NoScale),
    mutant("scale-twice", L1, "scores are scaled twice", ScaleTwice),
    mutant("scale-of-head-size", L1, "1/sqrt(head size) instead of the layer's scale", ScaleOfHeadSize),
    mutant("soft-cap-before-scale", L1, "the soft cap applies to unscaled scores", CapBeforeScale),
    mutant("soft-cap-ignored", L1, "there is no soft cap", CapIgnored),
    mutant("soft-cap-clamps", L1, "scores are cut at the soft cap", CapClamps),
    mutant("scores-in-float16", L1, "scores overflow or lose digits in float16", NarrowScores),
    mutant("scores-in-bfloat16", L1, "scores are rounded to bfloat16", BFloat16Scores),
    mutant("no-peak", L1, "the maximum is not taken off before exponentials", NoPeak),
    mutant("peak-of-all-heads", L1, "one maximum serves all rows and heads", PeakOfAllHeads),
    mutant("sums-in-float16", L1, "the output is added up in float16", HalfSums),
    mutant("sums-in-bfloat16", L1, "the output is added up in bfloat16", BFloat16Sums),
    mutant("sinks-ignored", L1, "there are no sinks", SinkIgnored),
    mutant("sinks-have-a-value", L1, "a sink's weight goes to the first value", SinkHasFirstValue),
    mutant("sinks-of-other-head", L1, "each head takes its neighbour's sink", SinkOfOtherHead),
    mutant("sinks-scaled", L1, "sinks are scaled like scores", SinkScaled),
    mutant("streaming-without-rescale", L1, "the output is not rescaled when the peak rises", StreamingWithoutRescale),
    mutant("streaming-peak-of-block", L1, "the running maximum may fall", StreamingPeakOfLastBlock),
    mutant("streaming-sink-each-block", L1, "the sink is added with each block", StreamingSinkEachBlock),
    mutant("splits-averaged", L1, "partial results are averaged", SplitsAveraged),
    mutant("splits-merged-in-base-2", L1, "partial results are merged in the wrong base", SplitsMergedInBaseTwo),
    mutant("split-sink-each-part", L1, "each part adds the sink", SplitSinkEachPart),
    mutant("split-drops-rest", L1, "keys past the last full part are dropped", SplitDropsRest),
)
