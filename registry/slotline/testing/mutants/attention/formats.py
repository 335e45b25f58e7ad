"""Mutants that get codes and scales of a cache wrong, and a right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slotline.registry.capability import Set
from slotline.registry.contracts.cache_tensors import INT8_TOKEN_HEAD
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.attention.making import mutant, offer
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

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().decode(codes.view(torch.uint8), scale)


class HeadsInReverse(CodedAttention):
    """Reads head h with the scale of head H - 1 - h."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().decode(codes, scale.flip(-1))


class ScaleOfTheFirst(CodedAttention):
    """Reads each block's keys with the scale of its first key."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        first = torch.arange(len(scale), device=scale.device) // self.block_size * self.block_size
        return super().decode(codes, scale[first])


class ScaleGrows(CodedAttention):
    """Keeps the larger scale of a slot's old vector and its new one."""

    def put_scale(self, stored: torch.Tensor, place: tuple[torch.Tensor, ...], scale: torch.Tensor) -> None:
        stored[place] = torch.fmax(stored[place], scale)


class ScaledScores(CodedAttention):
    """Reads keys as codes and multiplies scores by the scales: right, and rounds elsewhere."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (codes.double() * scale.double()[..., None]).float()


OFFER: dict[str, Any] = {
    "cache_formats": Set((INT8_TOKEN_HEAD,)),
    "dtypes": Set((("float32", "int8"), ("bfloat16", "int8"))),
    "attention_types": Set(("decoder",)),
}


def _coded(name: str, level: Level, summary: str, factory: Callable[..., Any]) -> Mutant:
    return mutant(name, level, summary, factory, **OFFER)


L1, L3 = Level.NUMERICS, Level.STATEFUL

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
)
CORRECT = (Correct("codes and scales, multiplied in float64", offer("codes", "codes", ScaledScores, **OFFER)),)
