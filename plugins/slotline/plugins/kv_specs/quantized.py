"""Cache specs of formats with a scale for each token and KV head, with the rules of `full` and `sliding`.

A kernel block holds its keys, its values, the keys' scales and the values' scales, each from a multiple of 16 bytes on.
In layout HND a head's scales lie side by side, like its vectors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slotline.plugins.kv_specs.full_cache import FullSpec
from slotline.plugins.kv_specs.local_cache import SlidingSpec
from slotline.plugins.kv_specs.paged import PagedSpec
from slotline.registry.cache_pages import bind_tensors, block_bytes
from slotline.registry.contracts.attention import AttentionLayer, LayerCache
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES, CacheTensor
from slotline.registry.contracts.kv_spec import KVSpecContext
from slotline.registry.errors import PluginError

if TYPE_CHECKING:
    import torch

SCALE = "float32"
"""Dtype of the scales."""


def scaled_tensors(layer: AttentionLayer, element: str) -> tuple[CacheTensor, ...]:
    """Return the tensors of a layer whose keys and values are of dtype `element`, with scales beside them."""
    heads = layer.num_kv_heads
    return (
        CacheTensor("key", element, (heads, layer.head_size), by_head=True),
        CacheTensor("value", element, (heads, layer.head_size_v), by_head=True),
        CacheTensor("key_scale", SCALE, (heads,), by_head=True),
        CacheTensor("value_scale", SCALE, (heads,), by_head=True),
    )


class ScaledSpec(PagedSpec):
    """Lays out codes and scales in kernel blocks. Implements `TensorSpec`, but for the rules of a kind of layers.

    Raises PluginError for a format that it does not know, and for layers with latents.
    """

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        self._element = _element(context)

    def tensors(self, layer: AttentionLayer) -> tuple[CacheTensor, ...]:
        return scaled_tensors(layer, self._element)

    def page_bytes(self, layer: AttentionLayer) -> int:
        return self._kernel_blocks(1) * block_bytes(self.tensors(layer), self._context.kernel_block_size)

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> LayerCache:
        size, layout = self._context.kernel_block_size, self._context.layout
        return bind_tensors(raw, self.tensors(layer), self._kernel_blocks(num_blocks), size, layout)

    def _kernel_blocks(self, num_blocks: int) -> int:
        return num_blocks * (self._context.block_size // self._context.kernel_block_size)


class FullQuantized(ScaledSpec, FullSpec):
    """Answers the pool's questions for layers that keep codes and scales of every token."""


class SlidingQuantized(ScaledSpec, SlidingSpec):
    """The same for layers that keep the last window."""


def _element(context: KVSpecContext) -> str:
    if context.format not in FORMAT_DTYPES or any(layer.mla for layer in context.layers):
        raise PluginError(
            f"cache format {context.format!r} is not laid out for layers {[layer.name for layer in context.layers]}",
            fix=f"choose one of {sorted(FORMAT_DTYPES)} for layers of keys and values",
        )
    return FORMAT_DTYPES[context.format]
