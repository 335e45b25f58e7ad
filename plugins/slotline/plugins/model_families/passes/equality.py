"""Whether a replacement computes what the original does, on random input."""

from __future__ import annotations

from collections.abc import Callable

import torch

PROBE_TOKENS = 3
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest difference, relative to the largest value of the original's output: a few roundings of the dtype."""

Function = Callable[[torch.Tensor], torch.Tensor]


def equal(original: Function, replacement: Function, features: int, like: torch.Tensor) -> bool:
    """Whether both give the same output for random input [1, PROBE_TOKENS, features] of `like`'s dtype and device.

    A replacement that raises or gives another shape or dtype is not equal, nor one of an original that cannot be called
    with its input alone (Zamba2's shared MLPs want to know the layer).
    """
    generator = torch.Generator().manual_seed(features)
    probe = torch.randn(1, PROBE_TOKENS, features, generator=generator).to(like.device, like.dtype)
    with torch.no_grad():
        try:
            expected = original(probe)
            found = replacement(probe.clone())
        except (RuntimeError, TypeError, ValueError, LookupError):
            return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return relative_difference(found, expected) <= TOLERANCES[like.dtype]


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of two tensors over the largest magnitude expected, in float32."""
    scale = expected.float().abs().max().clamp_min(1e-20)
    return float((found.float() - expected.float()).abs().max() / scale)
