"""Cache specs of formats with a scale for each token and KV head, with the rules of `full` and `sliding`.

A kernel block holds its keys, its values, the keys' scales and the values' scales, each from a multiple of 16 bytes on.
In layout HND a head's scales lie side by side, like its vectors.
"""

from __future__ import annotations

from slotline.plugins.kv_specs.full_cache import FullSpec
from slotline.plugins.kv_specs.local_cache import SlidingSpec
from slotline.plugins.kv_specs.named_tensors import NamedTensorsSpec
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES, CacheTensor, stored_size
from slotline.registry.contracts.kv_spec import KVSpecContext
from slotline.registry.errors import PluginError

SCALE = "float32"
"""Dtype of the scales."""


def scaled_tensors(layer: AttentionLayer, cache_format: str) -> tuple[CacheTensor, ...]:
    """Return the tensors of a layer's keys and values as codes of a format, with scales beside them."""
    heads, element = layer.num_kv_heads, FORMAT_DTYPES[cache_format]
    return (
        CacheTensor("key", element, (heads, stored_size(cache_format, layer.head_size)), by_head=True),
        CacheTensor("value", element, (heads, stored_size(cache_format, layer.head_size_v)), by_head=True),
        CacheTensor("key_scale", SCALE, (heads,), by_head=True),
        CacheTensor("value_scale", SCALE, (heads,), by_head=True),
    )


class ScaledSpec(NamedTensorsSpec):
    """Lays out codes and scales in kernel blocks.

    Raises PluginError for a format that it does not know, and for layers with latents.
    """

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        _check(context)

    def tensors(self, layer: AttentionLayer) -> tuple[CacheTensor, ...]:
        return scaled_tensors(layer, self._context.format)


class FullQuantized(ScaledSpec, FullSpec):
    """Answers the pool's questions for layers that keep codes and scales of every token."""


class SlidingQuantized(ScaledSpec, SlidingSpec):
    """The same for layers that keep the last window."""


def _check(context: KVSpecContext) -> None:
    if context.format not in FORMAT_DTYPES or any(layer.mla for layer in context.layers):
        raise PluginError(
            f"cache format {context.format!r} is not laid out for layers {[layer.name for layer in context.layers]}",
            fix=f"choose one of {sorted(FORMAT_DTYPES)} for layers of keys and values",
        )
