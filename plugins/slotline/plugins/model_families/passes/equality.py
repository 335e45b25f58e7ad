"""Test that a replacement computes the same as the original, on random input."""

from __future__ import annotations

from collections.abc import Callable

import torch

PROBE_TOKENS = 3
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest difference, relative to the largest value of the original's output: a few roundings of the dtype."""

Function = Callable[[torch.Tensor], torch.Tensor]


def equal(original: Function, replacement: Function, features: int, like: torch.Tensor) -> bool:
    """Return True if both give the same output for random input [1, PROBE_TOKENS, features] like `like`.

    The input has `like`'s dtype and device. A replacement that raises or returns another shape or dtype is not equal.
    The same holds if the original cannot be called with only its input (Zamba2's shared MLPs need the layer).
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
    """Return the largest difference of two tensors over the largest expected magnitude, in float32."""
    scale = expected.float().abs().max().clamp_min(1e-20)
    return float((found.float() - expected.float()).abs().max() / scale)
