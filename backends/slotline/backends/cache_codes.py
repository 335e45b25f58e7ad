"""Codes and scales of caches with one scale for each token and KV head, in torch: see the cache formats' contract."""

from __future__ import annotations

import torch


def encode(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of vectors [..., D] in `dtype`, int8 or an eight-bit float, and their scales [...] float32.

    Scales below the smallest normal float32 are raised to it.
    """
    exact = vectors.float()
    scale = (exact.abs().amax(-1) / _most(dtype)).clamp_min(torch.finfo(torch.float32).tiny)
    quotient = exact / scale.unsqueeze(-1)
    codes = quotient.round() if dtype == torch.int8 else quotient
    return codes.clamp(-_most(dtype), _most(dtype)).to(dtype), scale


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the vectors [..., D] float32 of codes [..., D] and scales [...]."""
    return codes.float() * scale.unsqueeze(-1)


def _most(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else float(torch.finfo(dtype).max)
