"""Codes and scales of caches with one scale for each token and KV head, in torch: see the cache formats' contract.

What rounds depends on the dtype of the stored elements alone: int8, float8_e4m3fn, or uint8 for two rotated codes of
four bits.
"""

from __future__ import annotations

from functools import cache

import torch

from slotline.registry.contracts.cache_tensors import CacheTensors

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.uint8: 7.0}
"""Largest code by the dtype of stored elements."""
FEW = 1 << 14
"""Elements on a CPU up to which threads for a matrix product would take longer than the rotation."""


def is_rotated(dtype: torch.dtype) -> bool:
    """Return True if vectors are rotated before they are rounded, so that queries and outputs must be as well."""
    return dtype == torch.uint8


def rotate(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., D] times the Hadamard matrix of each piece, float32, unnormalised.

    A piece has as many elements as the largest power of two that divides D.
    """
    size = vectors.shape[-1]
    piece = size & -size
    if vectors.device.type == "cpu" and vectors.numel() <= FEW:
        return _butterflies(vectors.float(), piece)
    pieces = vectors.float().reshape(*vectors.shape[:-1], size // piece, piece)
    return (pieces @ _hadamard(piece, vectors.device)).flatten(-2)


def _butterflies(vectors: torch.Tensor, piece: int) -> torch.Tensor:
    """Do the same by sums and differences of neighbours, halves, quarters and so on, in one thread."""
    shape, step = vectors.shape, 1
    while step < piece:
        pairs = vectors.reshape(vectors.numel() // (2 * step), 2, step)
        vectors = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
        step *= 2
    return vectors.reshape(shape)


def turned(vectors: torch.Tensor) -> torch.Tensor:
    """Return what is rounded of vectors [..., D] that are rotated, float32."""
    size = vectors.shape[-1]
    return rotate(vectors) / (size & -size)


@cache
def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Return Sylvester's matrix [size, size] of 1 and -1."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.to(device)


def encode(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of vectors [..., D] in `dtype` and their scales [...] float32.

    Scales below the smallest normal float32 are raised to it.
    """
    exact, most = vectors.float(), MOST[dtype]
    if is_rotated(dtype):
        exact = turned(exact)
    scale = (exact.abs().amax(-1) / most).clamp_min(torch.finfo(torch.float32).tiny)
    quotient = (exact / scale.unsqueeze(-1)).clamp(-most, most)
    if dtype.is_floating_point:
        return quotient.to(dtype), scale
    codes = quotient.round()
    return (pack(codes) if is_rotated(dtype) else codes.to(dtype)), scale


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [..., D] from -7 to 7 as bytes [..., ceil(D / 2)]."""
    halves = (codes + 8).to(torch.uint8)
    if codes.shape[-1] % 2:
        halves = torch.nn.functional.pad(halves, (0, 1), value=8)
    return halves[..., 0::2] | halves[..., 1::2] << 4


def store(cache: CacheTensors, name: str, vectors: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
    """Store vectors [n, Hkv, D] as the cache's codes and scales `name` at n blocks and offsets."""
    codes, scale = encode(vectors, cache[name].dtype)
    raw(cache[name])[blocks, offsets] = raw(codes)
    cache[f"{name}_scale"][blocks, offsets] = scale


def decode(codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
    """Return vectors [..., size] float32 of codes and scales [...]. Rotated ones stay rotated."""
    if is_rotated(codes.dtype):
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[..., :size].float() - 8
    return codes.float() * scale.unsqueeze(-1)


def restore(codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
    """Return vectors [..., size] float32 of codes and scales [...], those that were rotated rotated back."""
    vectors = decode(codes, scale, size)
    return rotate(vectors) if is_rotated(codes.dtype) else vectors


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """View elements of eight bits as bytes, because eight-bit floats cannot be indexed on every device."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
