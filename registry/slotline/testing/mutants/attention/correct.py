"""Right implementations whose arithmetic differs from the reference's: their errors are what a tolerance must allow."""

from __future__ import annotations

import torch

from slotline.registry.contracts.attention import AttentionLayer
from slotline.testing.mutants import Correct
from slotline.testing.mutants.attention.making import offer
from slotline.testing.reference.attention import descriptor
from slotline.testing.reference.attention.backend import EagerAttention


class StreamingAttention(EagerAttention):
    """Block after block with a running maximum and sum.

    The online softmax of Milakov and Gimelshein, arXiv 1805.02867, with the output carried along as in Dao and others,
    arXiv 2205.14135, algorithm 1.
    """

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        peak, total, out = self.begin(layer, query, values, sinks)
        for start in range(0, len(keys), self.block_size):
            part = slice(start, start + self.block_size)
            scores = self.scores(layer, query, keys[part]).masked_fill(~seen[:, part], -torch.inf)  # [H, q, block]
            higher = self.higher(peak, scores)
            shrink = self.shrink(peak, higher)
            weights = torch.exp(scores - finite(higher)[:, :, None])
            total = total * shrink + weights.sum(dim=2)
            out = self.carried(out, shrink) + self.combine(weights, self.expand(layer, values[part]))
            peak = higher
        return out / total.T[:, :, None], peak + torch.log(total)

    def begin(
        self, layer: AttentionLayer, query: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return peak and sum [H, q] and output [q, H, Dv] before the first key. A sink is already in the sum."""
        peak = torch.full((layer.num_heads, len(query)), -torch.inf, device=query.device)
        total = torch.zeros_like(peak)
        if sinks is not None:
            peak, total = sinks.float()[:, None].expand_as(peak), total + 1
        return peak, total, torch.zeros(len(query), layer.num_heads, values.shape[2], device=query.device)

    def higher(self, peak: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the largest score so far, [H, q]."""
        return torch.maximum(peak, scores.amax(dim=2))

    def shrink(self, peak: torch.Tensor, higher: torch.Tensor) -> torch.Tensor:
        """Return the factor that rescales the sums from the old peak to the new one, [H, q]."""
        return torch.exp(peak - finite(higher))

    def carried(self, out: torch.Tensor, shrink: torch.Tensor) -> torch.Tensor:
        """Return the output so far under the new peak."""
        return out * shrink.T[:, :, None]


class SplitAttention(EagerAttention):
    """The keys in parts, the last part first. Partial results are merged by their LSE."""

    parts = 3

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        partial = [
            self.attend_part(layer, query, keys[part], values[part], seen[:, part]) for part in self.split(len(keys))
        ]
        lse = torch.stack([own for _, own in partial])  # [parts, H, q]
        whole = torch.logsumexp(self.with_sink(lse, sinks), dim=0)
        shares = self.shares(lse, whole)
        out = sum(share.T[:, :, None] * own for share, (own, _) in zip(shares, partial, strict=True))
        return torch.as_tensor(out), whole

    def split(self, length: int) -> list[slice]:
        """Return parts of equal size, the last first. None is empty."""
        size = max(1, -(-length // self.parts))
        return [slice(start, start + size) for start in range(0, length, size)][::-1]

    def attend_part(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over some keys: out [q, H, Dv], zero where none is seen, and LSE [H, q]."""
        scores = self.scores(layer, query, keys).masked_fill(~seen, -torch.inf)
        peak = finite(scores.amax(dim=2))
        weights = torch.exp(scores - peak[:, :, None])
        total = weights.sum(dim=2)
        out = self.combine(weights, self.expand(layer, values)) / total.clamp(min=1e-30).T[:, :, None]
        return out, peak + torch.log(total)

    def with_sink(self, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Return the LSE of each part, and the sink as an additional part."""
        return lse if sinks is None else torch.cat([lse, sinks.float()[None, :, None].expand_as(lse[:1])])

    def shares(self, lse: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return the weight of each part, [parts, H, q]."""
        return torch.exp(lse - whole)


def finite(peak: torch.Tensor) -> torch.Tensor:
    """Zero where no key was seen yet, so that differences of infinities do not arise."""
    return peak.masked_fill(peak == -torch.inf, 0.0)


CORRECT = (
    Correct("eager: all scores of a request at once", descriptor),
    Correct("streaming: online softmax, block after block", offer("streaming", "online softmax", StreamingAttention)),
    Correct("split: three parts of the keys in reverse, merged by LSE", offer("split", "split keys", SplitAttention)),
)
