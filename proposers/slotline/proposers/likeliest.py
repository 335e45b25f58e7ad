"""The likeliest token of each row of logits."""

from __future__ import annotations

from math import gcd

import torch

PARTS = 64
"""Of a row, looked at side by side: a row as one would keep one multiprocessor of a GPU busy, and the others idle."""


def likeliest(logits: torch.Tensor, parts: int | None = None) -> torch.Tensor:
    """The first of the largest entries of each row [n, vocab_size], as `argmax` gives it: [n] int64.

    Args:
        parts: into how many a row is cut, a divisor of vocab_size; by default one on a CPU.
    """
    size = logits.shape[1]
    parts = parts or (gcd(PARTS, size) if logits.is_cuda else 1)
    if parts == 1:
        return logits.argmax(-1)
    best = logits.unflatten(1, (parts, -1)).max(-1)
    part = best.values.argmax(-1, keepdim=True)
    found: torch.Tensor = (part * (size // parts) + best.indices.gather(1, part)).squeeze(1)
    return found
