"""Attention sinks for kernels that know none: a sink is one more key, so it scales the output and adds to the LSE."""

from __future__ import annotations

import math

import torch

LN2 = math.log(2.0)


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, *, base: str = "e") -> torch.Tensor:
    """Count a sink as one more key without a value.

    Args:
        out: [num_tokens, num_heads, head_size_v], attention without sinks. It is rescaled in place.
        lse: [num_tokens, num_heads] float32, its log-sum-exp in `base`.
        sinks: [num_heads], a logit for each head.
        base: ``e`` or ``2``.

    Returns:
        The log-sum-exp with the sink, in `base`. If no key was seen, it is the sink's own.
    """
    logits = sinks.float() if base == "e" else sinks.float() / LN2
    whole = torch.logaddexp(lse, logits) if base == "e" else torch.logaddexp2(lse, logits)
    share = torch.exp(lse - whole) if base == "e" else torch.exp2(lse - whole)
    out.mul_(share.unsqueeze(2))
    return whole
