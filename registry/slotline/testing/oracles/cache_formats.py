"""Codes and scales of the cache formats that slotline defines, as their contract says, in torch on the host."""

from __future__ import annotations

import torch

from slotline.registry.contracts.cache_tensors import FP8_TOKEN_HEAD, INT4_ROTATED, INT8_TOKEN_HEAD

MOST = {INT8_TOKEN_HEAD: 127.0, FP8_TOKEN_HEAD: 448.0, INT4_ROTATED: 7.0}
"""Largest code of each format."""
MOST_SUM = 256.0
"""Largest sum of a piece's absolute codes in `exact_vectors`: bfloat16 has whole numbers up to it."""


def hadamard(size: int) -> torch.Tensor:
    """Return Sylvester's Hadamard matrix [size, size] of a power of two, float32 of 1 and -1."""
    index = torch.arange(size)
    common, odd = index[:, None] & index, torch.zeros(size, size, dtype=torch.int64)
    for bit in range(size.bit_length()):
        odd ^= common >> bit & 1
    return 1.0 - 2.0 * odd


def rotate(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., D] times the Hadamard matrix of each piece, unnormalised, float32."""
    size = vectors.shape[-1]
    piece = size & -size
    rotated = vectors.float().reshape(*vectors.shape[:-1], size // piece, piece) @ hadamard(piece).to(vectors.device)
    return rotated.flatten(-2)


def turned(vectors: torch.Tensor, cache_format: str) -> torch.Tensor:
    """Return what a format rounds of vectors [..., D], float32."""
    if cache_format != INT4_ROTATED:
        return vectors.float()
    size = vectors.shape[-1]
    return rotate(vectors) / (size & -size)


def encode(vectors: torch.Tensor, cache_format: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes [..., elements] of vectors [..., D] in `dtype`, and the scales [...] float32.

    The code of a vector's largest element is the largest code. Vectors of zeros have a scale of 1.
    """
    exact = turned(vectors, cache_format)
    scale = exact.abs().amax(-1) / MOST[cache_format]
    scale = torch.where(scale > 0, scale, 1.0)
    codes = exact / scale.unsqueeze(-1)
    if cache_format == INT4_ROTATED:
        return packed(codes.round()), scale
    return (codes if dtype.is_floating_point else codes.round()).to(dtype), scale


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [..., D] from -8 to 7 two a byte, the even ones in the lower halves."""
    halves = torch.nn.functional.pad(codes.int() + 8, (0, codes.shape[-1] % 2), value=8)
    return (halves[..., 0::2] + 16 * halves[..., 1::2]).to(torch.uint8)


def unpacked(stored: torch.Tensor, size: int) -> torch.Tensor:
    """Return the codes [..., size] of bytes."""
    halves = stored.view(torch.uint8).int()
    return torch.stack([halves & 15, halves >> 4], -1).flatten(-2)[..., :size] - 8


def decode(codes: torch.Tensor, scale: torch.Tensor, cache_format: str, size: int) -> torch.Tensor:
    """Return the vectors [..., size] float32 of codes and scales."""
    if cache_format != INT4_ROTATED:
        return codes.float() * scale.unsqueeze(-1)
    return rotate(unpacked(codes, size) * scale.unsqueeze(-1))


def exact_vectors(
    shape: tuple[int, int, int], cache_format: str, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return random vectors [n, Hkv, D] float32 that the format stores without an error.

    Each is a power of two, from 2 ** -8 to 2 ** -5 for int8, times codes of which one is the largest. The division of
    the largest element by that code is then exact, and so are all codes. Of codes that are rotated, enough are 0 for
    the vectors to be exact in bfloat16.
    """
    most = MOST[cache_format]
    codes = (torch.rand(shape, generator=generator) * 2 - 1) * most
    codes = codes.to(dtype).float() if dtype.is_floating_point else codes.round()
    at = torch.randint(shape[2], (*shape[:2], 1), generator=generator)
    sign = torch.randint(2, at.shape, generator=generator) * 2.0 - 1
    if cache_format == INT4_ROTATED:
        codes = _thinned(codes, most, generator)
    codes.scatter_(2, at, sign * most)
    power = torch.randint(-8, -4, (*shape[:2], 1), generator=generator).float() - (most > 127) * 2
    vectors = codes * torch.exp2(power)
    return rotate(vectors) if cache_format == INT4_ROTATED else vectors


def _thinned(codes: torch.Tensor, most: float, generator: torch.Generator) -> torch.Tensor:
    """Return codes [n, Hkv, D] with zeros in random places, so that no piece's sum with one more code is too large."""
    size = codes.shape[-1]
    piece = size & -size
    kept = torch.rand(codes.shape, generator=generator) * piece * most * 0.6 < MOST_SUM
    parts = (codes * kept).unflatten(-1, (size // piece, piece))
    few: torch.Tensor = parts * (parts.abs().cumsum(-1) <= MOST_SUM - most)
    return few.flatten(-2)


def rounding_error(vectors: torch.Tensor, cache_format: str) -> torch.Tensor:
    """Return the largest error [..., D] with which the format may store what it rounds, `turned` vectors [..., D].

    It is half a step between codes, with a thousandth more for the division.
    """
    scale = vectors.abs().amax(-1, keepdim=True) / MOST[cache_format]
    if cache_format == FP8_TOKEN_HEAD:  # three bits behind the leading one, down to 2 ** -6, then steps of 2 ** -9
        return 1.001 * torch.maximum(vectors.abs() * 2.0**-4, scale * 2.0**-10)
    return (0.5005 * scale).expand_as(vectors)
