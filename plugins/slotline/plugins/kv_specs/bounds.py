"""Cache spec of the format `key_bounds`: keys, values, and the bounds of each block's keys."""

from __future__ import annotations

from slotline.plugins.kv_specs.full_cache import FullSpec
from slotline.plugins.kv_specs.named_tensors import NamedTensorsSpec
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.cache_tensors import KEY_BOUNDS, CacheTensor
from slotline.registry.contracts.kv_spec import KVSpecContext
from slotline.registry.errors import PluginError


class FullBounds(NamedTensorsSpec, FullSpec):
    """Keeps every token, and two vectors for each kernel block and KV head.

    Raises PluginError for another format, and for layers with latents.
    """

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        if context.format != KEY_BOUNDS or any(layer.mla for layer in context.layers):
            raise PluginError(
                f"cache format {context.format!r} has no bounds for layers {[layer.name for layer in context.layers]}",
                fix=f"choose {KEY_BOUNDS!r} for layers of keys and values",
            )

    def tensors(self, layer: AttentionLayer) -> tuple[CacheTensor, ...]:
        heads, dtype = layer.num_kv_heads, self._context.kv_dtype
        return (
            CacheTensor("key", dtype, (heads, layer.head_size), by_head=True),
            CacheTensor("value", dtype, (heads, layer.head_size_v), by_head=True),
            CacheTensor(KEY_BOUNDS, dtype, (2, heads, layer.head_size), per="block"),
        )
