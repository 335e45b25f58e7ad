"""What attention should give, in float64, one request and one head at a time; and how far a backend may be off.

Shares no code with any backend. The rule for the tolerance compares a backend with the same formula computed in
the backend's own dtype: a fixed figure would reject right kernels at short contexts and accept wrong ones at long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Answer(NamedTuple):
    """out [q, H, Dv], lse [H, q], and the largest absolute score."""

    out: torch.Tensor
    lse: torch.Tensor
    max_score: float


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Answer:
    """Attention of query [q, H, D], the last tokens, over keys [L, Hkv, D] and values [L, Hkv, Dv], all in `dtype`."""
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    position = torch.arange(num_keys)[None, :]
    own = torch.arange(num_keys - num_queries, num_keys)[:, None]  # position of each query
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if causal:
        seen &= position <= own
    if window is not None:
        seen &= position >= own - window + 1
    out, lse, largest = [], [], 0.0
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = query[:, head].to(dtype) @ keys[:, kv_head].to(dtype).T * scale  # [q, L]
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        largest = max(largest, float(scores.abs().max()) if scores.numel() else 0.0)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks[head].to(dtype).expand(num_queries, 1)
            scores = torch.cat([scores, sink], 1)
        weights = torch.softmax(scores, 1)[:, :num_keys]
        out.append(weights @ values[:, kv_head].to(dtype))
        lse.append(torch.logsumexp(scores.double(), 1))
    return Answer(torch.stack(out, 1), torch.stack(lse), largest)


def tolerance(exact: Answer, eager: Answer, values: torch.Tensor, dtype: torch.dtype) -> float:
    """3 x the error of the same formula in `dtype`, a floor that grows with the scores, and two units of the output."""
    baseline = float((eager.out.double() - exact.out).abs().max())
    top = float(values.double().abs().max())
    floor = 2 * torch.finfo(torch.float32).eps * (1 + exact.max_score) * top
    units = 2 * torch.finfo(dtype).eps * float(exact.out.abs().max())
    return 3 * baseline + floor + units
