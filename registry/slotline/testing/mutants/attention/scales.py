"""Mutants that get the scales of an eight-bit cache wrong."""

from __future__ import annotations

import torch

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache, KVScales
from slotline.testing.check import Level
from slotline.testing.mutants.attention.making import mutant
from slotline.testing.reference.attention.backend import EagerAttention, Plan

Pair = tuple[torch.Tensor | None, torch.Tensor | None]


class IgnoredOnWrite(EagerAttention):
    def write_scales(self, layer: AttentionLayer) -> Pair:
        return None, None


class IgnoredOnRead(EagerAttention):
    def read_scales(self, layer: AttentionLayer) -> Pair:
        return None, None


class Ignored(EagerAttention):
    """Neither on write nor on read: exact as long as the cache's range suffices, but not what others read there."""

    def scales(self, layer: AttentionLayer) -> Pair:
        return None, None


class Swapped(EagerAttention):
    def scales(self, layer: AttentionLayer) -> Pair:
        keys, values = super().scales(layer)
        return values, keys


class SwappedOnRead(EagerAttention):
    def read_scales(self, layer: AttentionLayer) -> Pair:
        keys, values = super().scales(layer)
        return values, keys


class KeyScaleForBoth(EagerAttention):
    def scales(self, layer: AttentionLayer) -> Pair:
        keys, _ = super().scales(layer)
        return keys, keys


class Inverted(EagerAttention):
    """Multiplies on write and divides on read."""

    def scales(self, layer: AttentionLayer) -> Pair:
        keys, values = super().scales(layer)
        return None if keys is None else 1 / keys, None if values is None else 1 / values


class AfterTheCap(EagerAttention):
    """Scales the capped scores by the keys' scale instead of the keys."""

    key_scale: torch.Tensor | None = None

    def read_scales(self, layer: AttentionLayer) -> Pair:
        self.key_scale, values = super().scales(layer)
        return None, values

    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        capped = super().cap(layer, scores)
        return capped if self.key_scale is None else capped * self.key_scale


class FirstLayersForAll(EagerAttention):
    def scales(self, layer: AttentionLayer) -> Pair:
        return next(iter(self.kv_scales.values()), (None, None))


class ByPlaceInTheGroup(EagerAttention):
    """Finds a layer's scales by its place among the group's layers instead of by its index."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.kv_scales = {place: context.kv_scales[i] for place, i in enumerate(sorted(context.kv_scales))}


class ReadWhenBuilt(EagerAttention):
    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.kv_scales = {
            index: KVScales(*(torch.tensor(float(scale)) for scale in pair))
            for index, pair in context.kv_scales.items()
        }


class ReadWhenPlanned(EagerAttention):
    def plan(self, batch: AttentionBatch) -> Plan:
        self.planned = {i: tuple(scale.clone() for scale in pair) for i, pair in self.kv_scales.items()}
        return super().plan(batch)

    def scales(self, layer: AttentionLayer) -> Pair:
        keys, values = self.planned.get(layer.index, (None, None))
        return keys, values


class NotClamped(EagerAttention):
    """As conversions of some devices and versions of torch do it."""

    def narrow(self, new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype.itemsize > 1:
            return new.to(dtype)
        return torch.where(new.abs() > torch.finfo(dtype).max, torch.nan, new.float()).to(dtype)


class ClampedBeforeScaling(EagerAttention):
    """Clamps to the cache's range, then divides."""

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        if cache.key.dtype.itemsize == 1:
            most = torch.finfo(cache.key.dtype).max
            key, value = key.clamp(-most, most), value.clamp(-most, most)
        super().write(layer, key, value, cache, plan)


L1, L2, L3 = Level.NUMERICS, Level.HOSTILE, Level.STATEFUL

MUTANTS = (
    mutant("scales-ignored-on-write", L1, "what is stored is not divided by its scale", IgnoredOnWrite),
    mutant("scales-ignored-on-read", L1, "what is read is not multiplied by its scale", IgnoredOnRead),
    mutant("scales-ignored", L1, "there are no scales, on write and on read", Ignored),
    mutant("scales-swapped", L1, "keys have the values' scale and values the keys'", Swapped),
    mutant("scales-swapped-on-read", L1, "keys are read with the values' scale", SwappedOnRead),
    mutant("scale-of-keys-for-both", L1, "values have the keys' scale", KeyScaleForBoth),
    mutant("scales-inverted", L1, "stored is x * scale, read is x / scale", Inverted),
    mutant("scale-after-the-cap", L1, "the keys' scale counts after the soft cap", AfterTheCap),
    mutant("scales-of-the-first-layer", L3, "all layers have the first one's scales", FirstLayersForAll),
    mutant(
        "scales-by-place", L3, "scales are found by place in the group, not by the layer's index", ByPlaceInTheGroup
    ),
    mutant("scales-read-when-built", L3, "scales are copied when the backend is built", ReadWhenBuilt),
    mutant("scales-read-when-planned", L3, "scales are copied when a step is planned", ReadWhenPlanned),
    mutant("overflow-to-nan", L2, "keys beyond an eight-bit float's range become NaN", NotClamped),
    mutant("clamped-before-scaling", L2, "keys are clamped before they are divided", ClampedBeforeScaling),
)
