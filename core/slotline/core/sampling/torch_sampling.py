"""Sampling in torch, for any device: what the CPU runs, and what the Triton kernels are held against."""

from __future__ import annotations

import numpy as np
import torch

from slotline.core.sampling.batch import PackedParameters, SamplingBatch


def sample_torch(
    logits: torch.Tensor, batch: SamplingBatch, params: torch.Tensor, *, keep_final: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sample rows of which at least one is not greedy; see `sampler.sample`."""
    columns = PackedParameters(params)
    final = mask_unlikely(scale(logits, columns), batch, columns)
    tokens = draw(final, columns)
    if (batch.temperature == 0).any():
        greedy = columns.greedy
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
        final = torch.where(greedy[:, None], logits, final) if keep_final else final
    return tokens, final if keep_final else None


def scale(logits: torch.Tensor, columns: PackedParameters) -> torch.Tensor:
    """Divide by the temperature; greedy rows stay as they are."""
    return logits / columns.temperature[:, None]


def mask_unlikely(logits: torch.Tensor, batch: SamplingBatch, columns: PackedParameters) -> torch.Tensor:
    """Set what min-p, top-k and top-p leave out to minus infinity; [n, vocab_size] float32 in and out."""
    if batch.min_p.any():
        floor = logits.max(dim=-1, keepdim=True).values + columns.log_min_p[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if not (batch.top_k.any() or (batch.top_p < 1).any()):
        return logits
    vocab_size = logits.shape[-1]
    largest = int(np.where(batch.top_k == 0, vocab_size, np.minimum(batch.top_k, vocab_size)).max(initial=1))
    if largest < vocab_size:  # a partial sort is enough when every row limits its tokens
        ordered = torch.topk(logits, largest, dim=-1).values
    else:
        ordered = torch.sort(logits, dim=-1, descending=True).values
    rank = torch.arange(largest, device=logits.device)
    top_k = columns.top_k[:, None]
    drop = (rank >= top_k) & (top_k > 0)
    probabilities = ordered.masked_fill(drop, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = columns.top_p[:, None]  # [n, 1]; a sum may round to 1 before the last token, so 1 drops nothing
    drop |= (before >= top_p) & (top_p < 1) & (rank > 0)
    # by value, not by place: equal logits stay or go together, whatever order the sort gave them
    least = ordered.masked_fill(drop, torch.inf).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < least, -torch.inf)


def draw(logits: torch.Tensor, columns: PackedParameters) -> torch.Tensor:
    """One token per row, [n] int64, by inverse transform of the softmax."""
    return invert(logits.softmax(dim=-1).double(), columns.uniform)


def invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token [n] int64 at which the cumulative weights [n, vocab_size] float64 pass a share [n] of their sum."""
    cumulative = weights.cumsum(dim=-1)
    target = numbers[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_max(weights.shape[-1] - 1)
