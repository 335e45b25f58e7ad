"""Codes and scales of the cache formats that slotline defines, as their contract says, in torch on the host."""

from __future__ import annotations

import torch

from slotline.registry.contracts.cache_tensors import INT8_TOKEN_HEAD

MOST = {INT8_TOKEN_HEAD: 127.0}
"""Largest code of each format."""


def encode(vectors: torch.Tensor, cache_format: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes [..., D] of vectors in `dtype`, and the scales [...] float32.

    The code of a vector's largest element is the largest code. Vectors of zeros have a scale of 1.
    """
    exact = vectors.float()
    scale = exact.abs().amax(-1) / MOST[cache_format]
    scale = torch.where(scale > 0, scale, 1.0)
    codes = exact / scale.unsqueeze(-1)
    return (codes if dtype.is_floating_point else codes.round()).to(dtype), scale


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the vectors [..., D] float32 of codes and scales."""
    return codes.float() * scale.unsqueeze(-1)


def exact_vectors(
    shape: tuple[int, int, int], cache_format: str, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return random vectors [n, Hkv, D] float32 that the format stores without an error.

    Each is a power of two, from 2 ** -8 to 2 ** -5 for int8, times codes of which one is the largest. The division of
    the largest element by that code is then exact, and so are all codes.
    """
    most = MOST[cache_format]
    codes = (torch.rand(shape, generator=generator) * 2 - 1) * most
    codes = codes.to(dtype).float() if dtype.is_floating_point else codes.round()
    at = torch.randint(shape[2], (*shape[:2], 1), generator=generator)
    sign = torch.randint(2, at.shape, generator=generator) * 2.0 - 1
    codes.scatter_(2, at, sign * most)
    power = torch.randint(-8, -4, (*shape[:2], 1), generator=generator).float() - (most > 127) * 2
    return codes * torch.exp2(power)


def rounding_error(vectors: torch.Tensor, cache_format: str) -> torch.Tensor:
    """Return the largest error [..., D] with which the format may store vectors [..., D] float32.

    It is half a step between codes, with a thousandth more for the division.
    """
    scale = vectors.abs().amax(-1, keepdim=True) / MOST[cache_format]
    return (0.5005 * scale).expand_as(vectors)
