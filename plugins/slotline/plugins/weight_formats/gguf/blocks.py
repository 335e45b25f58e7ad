"""Blocks of GGUF's quantized types as canonical codes, scales and offsets.

The layouts are those of ggml (ggml-quants.c). Blocks of Q4_0 and Q8_0 have 32 numbers, super-blocks of the K types 256.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from attrs import frozen

from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme

Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [rows, blocks, numbers] int8, scales and offsets [rows, blocks, groups] float32."""


@frozen(kw_only=True)
class BlockType:
    """Quantized type.

    Attributes:
        scheme: what it means.
        size, num_bytes: numbers and bytes of a block.
        decode: from blocks [rows, blocks, num_bytes] uint8.
    """

    scheme: WeightScheme
    size: int
    num_bytes: int
    decode: Callable[[torch.Tensor], Decoded]


def decoded(kind: BlockType, rows: torch.Tensor) -> QuantizedWeight:
    """Return the weight of rows of blocks [out_features, bytes] uint8."""
    codes, scales, offsets = kind.decode(rows.unflatten(1, (-1, kind.num_bytes)))
    return QuantizedWeight(
        scheme=kind.scheme,
        codes=codes.flatten(1).contiguous(),
        scales=scales.flatten(1).contiguous(),
        offsets=None if offsets is None else offsets.flatten(1).contiguous(),
    )


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return a float16 of each block as float32, [rows, blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: torch.Tensor) -> Decoded:
    packed = blocks[..., 2:]
    codes = torch.cat((packed & 15, packed >> 4), -1).to(torch.int8) - 8
    return codes, _half(blocks, 0), None


def _q8_0(blocks: torch.Tensor) -> Decoded:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _q4_k(blocks: torch.Tensor) -> Decoded:
    low, high = _half(blocks, 0), _half(blocks, 2)
    packed = blocks[..., 4:16].int()  # eight scales and eight minima of six bits
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), -1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), -1)
    quants = blocks[..., 16:].unflatten(-1, (4, 32))  # 64 numbers in each: low nibbles, then high ones
    codes = torch.stack((quants & 15, quants >> 4), -2).flatten(-3).to(torch.int8) - 8
    scale = low * scales
    return codes, scale, 8 * scale - high * minima


def _q6_k(blocks: torch.Tensor) -> Decoded:
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))  # halves of 128 numbers, two runs of 32
    high = blocks[..., 128:192].unflatten(-1, (2, 32))
    parts = [low[..., 0, :] & 15, low[..., 1, :] & 15, low[..., 0, :] >> 4, low[..., 1, :] >> 4]
    numbers = [part | ((high >> shift & 3) << 4) for part, shift in zip(parts, (0, 2, 4, 6), strict=True)]
    codes = torch.stack(numbers, -2).flatten(-3).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return codes, _half(blocks, 208) * scales, None


TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "Q4_0": BlockType(
            scheme=WeightScheme(name="int4", group=(1, 32), activation="int8"), size=32, num_bytes=18, decode=_q4_0
        ),
        "Q8_0": BlockType(
            scheme=WeightScheme(name="int8", group=(1, 32), activation="int8"), size=32, num_bytes=34, decode=_q8_0
        ),
        "Q4_K": BlockType(
            scheme=WeightScheme(name="int4", group=(1, 32), activation="int8", symmetric=False),
            size=256,
            num_bytes=144,
            decode=_q4_k,
        ),
        "Q6_K": BlockType(
            scheme=WeightScheme(name="int6", group=(1, 16), activation="int8"), size=256, num_bytes=210, decode=_q6_k
        ),
    }
)
"""The types that stay quantized. llama.cpp rounds activations to eight bits for them.

Weights of other types are dequantized when a file is unpacked."""
