"""Scales of an eight-bit cache: a pair of device scalars a layer, from the checkpoint or from the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from slotline.registry.contracts import AttentionLayer, KVScales

HEADROOM = 4.0
"""Ratio by which later keys or values may exceed the first step's largest before they are clamped.

Eight-bit floats lose no precision by it: their relative rounding error is the same at any size except the smallest.
"""


class KVScaleTable:
    """The scales of the layers that own a cache. Layers that read another layer's cache use its scales.

    Attributes:
        by_layer: the scales that backends get, by layer index.
        pending: True until the scales have been calculated.

    Args:
        layers: all attention layers of the model.
        values: scales (of keys, of values) by layer index. A layer without an entry has scales of 1.
        device_of: the device of a layer.
        dtype: of the cache.
        calculate: take the scales from the first step's keys and values instead.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        values: Mapping[int, tuple[float, float]],
        *,
        device_of: Callable[[AttentionLayer], str],
        dtype: torch.dtype,
        calculate: bool,
    ) -> None:
        self.pending = calculate
        self._most = torch.finfo(dtype).max / HEADROOM
        self.by_layer: dict[int, KVScales] = {}
        for layer in layers:
            if layer.shares_kv_with is None:
                pair = (1.0, 1.0) if calculate else values.get(layer.index, (1.0, 1.0))
                self.by_layer[layer.index] = KVScales(*(torch.tensor(each, device=device_of(layer)) for each in pair))
        for layer in layers:
            if layer.shares_kv_with is not None:
                self.by_layer[layer.index] = self.by_layer[layer.shares_kv_with]

    def calculate(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        """Set a layer's scales from a step's keys and values [num_tokens, num_kv_heads, size], on the device."""
        if layer.shares_kv_with is not None:
            return
        for scale, new in zip(self.by_layer[layer.index], (key, value), strict=True):
            largest = new.abs().amax().float()
            scale.copy_(torch.where(largest > 0, largest / self._most, 1.0))
