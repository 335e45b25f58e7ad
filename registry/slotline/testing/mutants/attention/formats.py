"""Mutants that get codes and scales of a cache wrong, and a right one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from slotline.registry.capability import Set
from slotline.registry.contracts.cache_tensors import FP8_TOKEN_HEAD, INT4_ROTATED, INT8_TOKEN_HEAD
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.attention.making import mutant, offer
from slotline.testing.oracles import cache_formats as oracle
from slotline.testing.reference.attention.formats import CodedAttention

Codes = tuple[torch.Tensor, torch.Tensor]


class OneScaleForAllHeads(CodedAttention):
    """The largest of a token's heads gives the scale of all."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        scale = vectors.float().abs().amax((-2, -1)) / 127
        scale = torch.where(scale > 0, scale, 1.0)[:, None].expand(vectors.shape[:2])
        return (vectors.float() / scale[:, :, None]).round().to(dtype), scale


class OneScaleForTheStep(CodedAttention):
    """The step's largest vector of a head gives the scale of all tokens."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        if not len(vectors):
            return super().encode(vectors, dtype)
        scale = vectors.float().abs().amax((0, -1)) / 127
        scale = torch.where(scale > 0, scale, 1.0)[None].expand(vectors.shape[:2])
        return (vectors.float() / scale[:, :, None]).round().to(dtype), scale


class Truncated(CodedAttention):
    """Converts to int8 without rounding, as a cast does."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        _, scale = super().encode(vectors, dtype)
        return (vectors.float() / scale[:, :, None]).to(dtype), scale


class By128(CodedAttention):
    """The largest element becomes 128, which int8 does not have."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        _, scale = super().encode(vectors, dtype)
        scale = scale * (127 / 128)
        return (vectors.float() / scale[:, :, None]).round().to(torch.int32).to(dtype), scale


class ZeroByZero(CodedAttention):
    """Divides a vector of zeros by its scale of 0 and stores that scale's inverse."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        codes, scale = super().encode(vectors, dtype)
        return codes, torch.where(vectors.abs().amax(-1) > 0, scale, torch.nan)


class LargestOnly(CodedAttention):
    """Takes the largest element for the largest absolute one."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        scale = vectors.float().amax(-1).clamp_min(1e-6) / 127
        return (vectors.float() / scale[:, :, None]).round().clamp(-127, 127).to(dtype), scale


class HalfScale(CodedAttention):
    """Rounds scales to half precision, in which small ones have few bits."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        codes, scale = super().encode(vectors, dtype)
        return codes, (scale * 2.0**-16).half().float() * 2.0**16


class ScalesSwapped(CodedAttention):
    def scale_names(self) -> tuple[str, str]:
        return "value_scale", "key_scale"


class KeyScaleForBoth(CodedAttention):
    def scale_names(self) -> tuple[str, str]:
        return "key_scale", "key_scale"


class Unsigned(CodedAttention):
    """Reads codes as bytes without a sign."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        return super().decode(codes.view(torch.uint8), scale, size)


class HeadsInReverse(CodedAttention):
    """Reads head h with the scale of head H - 1 - h."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        return super().decode(codes, scale.flip(-1), size)


class ScaleOfTheFirst(CodedAttention):
    """Reads each block's keys with the scale of its first key."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        first = torch.arange(len(scale), device=scale.device) // self.block_size * self.block_size
        return super().decode(codes, scale[first], size)


class ScaleGrows(CodedAttention):
    """Keeps the larger scale of a slot's old vector and its new one."""

    def put_scale(self, stored: torch.Tensor, place: tuple[torch.Tensor, ...], scale: torch.Tensor) -> None:
        stored[place] = torch.fmax(stored[place], scale)


class ScaledScores(CodedAttention):
    """Reads keys as codes and multiplies scores by the scales: right, and rounds elsewhere."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        return (codes.double() * scale.double()[..., None]).float()


class SmallerRange(CodedAttention):
    """Scales to 240, the largest code of another eight-bit float."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        scale = vectors.float().abs().amax(-1).clamp_min(1e-30) / 240
        return (vectors.float() / scale[:, :, None]).to(dtype), scale


class TwiceRounded(CodedAttention):
    """Rounds to whole numbers before it converts to eight-bit floats."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        _, scale = super().encode(vectors, dtype)
        return (vectors.float() / scale[:, :, None]).round().to(dtype), scale


class Overflows(CodedAttention):
    """Divides by a scale that is a little too small, so that the largest codes become NaN."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        _, scale = super().encode(vectors, dtype)
        scale = scale * 0.95
        return (vectors.float() / scale[:, :, None]).to(dtype), scale


class InEightBits(CodedAttention):
    """Rounds scales to an eight-bit float."""

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        codes, scale = super().encode(vectors, dtype)
        return codes, (scale * 256).to(torch.float8_e5m2).float() / 256


class Nibbles(CodedAttention):
    """Codes of four bits whose steps mutants change one by one."""

    most = 7.0

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> Codes:
        turned = self.turn(vectors)
        scale = turned.abs().amax(-1) / self.most
        scale = torch.where(scale > 0, scale, 1.0)
        return self.pack(self.round(turned / scale[:, :, None])), scale

    def turn(self, vectors: torch.Tensor) -> torch.Tensor:
        return oracle.turned(vectors, INT4_ROTATED)

    def round(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.round()

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        return oracle.packed(codes)


class NotRotated(Nibbles):
    def turn(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors.float()


class RotatedInPairs(Nibbles):
    """Rotates pieces of two elements, whatever the size of a head."""

    def turn(self, vectors: torch.Tensor) -> torch.Tensor:
        if vectors.shape[-1] % 2:
            return vectors.float()
        pairs = vectors.float().reshape(*vectors.shape[:-1], vectors.shape[-1] // 2, 2)
        return (pairs @ oracle.hadamard(2).to(vectors.device)).flatten(-2) / 2


class Reversed(Nibbles):
    """Rotates by the matrix whose rows are in the reverse order."""

    def turn(self, vectors: torch.Tensor) -> torch.Tensor:
        turned = super().turn(vectors)
        piece = vectors.shape[-1] & -vectors.shape[-1]
        return turned.reshape(*turned.shape[:-1], turned.shape[-1] // piece, piece).flip(-1).flatten(-2)


class CutNibbles(Nibbles):
    def round(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.trunc()


class ByEight(Nibbles):
    """The largest element becomes 8, which four bits do not have."""

    most = 8.0

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        return super().pack((codes + 8) % 16 - 8)


class TwosComplement(Nibbles):
    """Stores codes without the eight that is added to each."""

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        return super().pack(codes) ^ 0x88


class UpperFirst(CodedAttention):
    """Reads the upper half of a byte as its first element."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        return super().decode(codes >> 4 | codes << 4, scale, size)


class HalfAfterHalf(CodedAttention):
    """Reads all lower halves of a head before the upper ones."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        both = torch.cat([codes & 15, codes >> 4], -1)[..., :size].int() - 8
        return oracle.rotate(both * scale.unsqueeze(-1))


class NotRotatedBack(CodedAttention):
    """Reads keys and values as they were rotated."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        return oracle.unpacked(codes, size) * scale.unsqueeze(-1)


class Shrunk(CodedAttention):
    """Rotates back by the matrix of length one, as if the stored vectors were."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        return super().decode(codes, scale, size) / math.sqrt(size & -size)


OFFER: dict[str, Any] = {
    "cache_formats": Set((INT8_TOKEN_HEAD,)),
    "dtypes": Set((("float32", "int8"), ("bfloat16", "int8"))),
    "attention_types": Set(("decoder",)),
}


FP8: dict[str, Any] = {
    **OFFER,
    "cache_formats": Set((FP8_TOKEN_HEAD,)),
    "dtypes": Set((("float32", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"))),
}
INT4: dict[str, Any] = {
    **OFFER,
    "cache_formats": Set((INT4_ROTATED,)),
    "dtypes": Set((("float32", "uint8"), ("bfloat16", "uint8"))),
}

L1, L3 = Level.NUMERICS, Level.STATEFUL


def _coded(name: str, level: Level, summary: str, factory: Callable[..., Any]) -> Mutant:
    return mutant(name, level, summary, factory, **OFFER)


def _fp8(name: str, summary: str, factory: Callable[..., Any]) -> Mutant:
    return mutant(f"fp8-codes-{name}", L1, summary, factory, **FP8)


def _int4(name: str, summary: str, factory: Callable[..., Any]) -> Mutant:
    return mutant(f"int4-codes-{name}", L1, summary, factory, **INT4)


MUTANTS = (
    _coded("codes-one-scale-for-heads", L1, "all heads of a token have one scale", OneScaleForAllHeads),
    _coded("codes-one-scale-for-the-step", L1, "all tokens of a step have one scale", OneScaleForTheStep),
    _coded("codes-truncated", L1, "codes are cut instead of rounded", Truncated),
    _coded("codes-by-128", L1, "the largest element becomes 128 and wraps around", By128),
    _coded("codes-of-zeros", L1, "a vector of zeros has a scale of NaN", ZeroByZero),
    _coded("codes-largest-without-sign", L1, "negative elements do not count for the scale", LargestOnly),
    _coded("codes-half-scale", L1, "scales are rounded to half precision", HalfScale),
    _coded("codes-scales-swapped", L1, "keys are read with the values' scales", ScalesSwapped),
    _coded("codes-key-scale-for-both", L1, "values are read with the keys' scales", KeyScaleForBoth),
    _coded("codes-unsigned", L1, "codes are read without their sign", Unsigned),
    _coded("codes-heads-in-reverse", L1, "heads are read with each other's scales", HeadsInReverse),
    _coded("codes-scale-of-the-first", L1, "a block is read with its first scale", ScaleOfTheFirst),
    _coded("codes-scale-grows", L3, "a slot keeps the largest scale that it had", ScaleGrows),
    _fp8("smaller-range", "the largest code is that of another eight-bit float", SmallerRange),
    _fp8("twice-rounded", "codes are rounded to whole numbers first", TwiceRounded),
    _fp8("overflow", "the largest elements become NaN", Overflows),
    _fp8("scale-in-eight-bits", "scales have two bits behind the leading one", InEightBits),
    _fp8("scales-swapped", "keys are read with the values' scales", ScalesSwapped),
    _fp8("heads-in-reverse", "heads are read with each other's scales", HeadsInReverse),
    _int4("not-rotated", "vectors are rounded as they are", NotRotated),
    _int4("rotated-in-pairs", "pieces have two elements", RotatedInPairs),
    _int4("reversed", "elements of a piece lie in the reverse order", Reversed),
    _int4("truncated", "codes are cut instead of rounded", CutNibbles),
    _int4("by-eight", "the largest element becomes 8 and wraps around", ByEight),
    _int4("twos-complement", "codes are stored in two's complement", TwosComplement),
    _int4("upper-first", "the upper half of a byte is read first", UpperFirst),
    _int4("half-after-half", "all lower halves are read before the upper ones", HalfAfterHalf),
    _int4("not-rotated-back", "keys and values are read as they were rotated", NotRotatedBack),
    _int4("shrunk", "vectors are read with the length of another matrix", Shrunk),
    _int4("key-scale-for-both", "values are read with the keys' scales", KeyScaleForBoth),
    _int4("heads-in-reverse", "heads are read with each other's scales", HeadsInReverse),
)
CORRECT = (
    Correct("codes and scales, multiplied in float64", offer("codes", "codes", ScaledScores, **OFFER)),
    Correct("eight-bit floats and scales", offer("fp8_codes", "codes of eight-bit floats", CodedAttention, **FP8)),
    Correct("rotated codes of four bits, step by step", offer("int4_codes", "rotated codes", Nibbles, **INT4)),
)
