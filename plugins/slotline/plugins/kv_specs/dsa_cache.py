"""The `dsa` cache spec: latents with the keys of an index beside them (DeepSeek-V3.2, arXiv 2512.02556).

A kernel block holds the latents of its tokens, then the index's keys of the same tokens, each from a multiple of 16
bytes on. Layers that use the picks of another layer keep latents alone, so their blocks are smaller.
"""

from __future__ import annotations

from slotline.plugins.kv_specs.full_cache import FullSpec
from slotline.plugins.kv_specs.named_tensors import NamedTensorsSpec
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.cache_tensors import LATENT_INDEX, CacheTensor
from slotline.registry.contracts.kv_spec import KVSpecContext
from slotline.registry.errors import PluginError

INDEX_KEY = "index_key"


class IndexedLatentSpec(NamedTensorsSpec, FullSpec):
    """Answers the pool's questions for layers of latents with an index. Implements `TensorSpec`.

    Raises PluginError for another format, and for a layer without latents or without an index.
    """

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        if context.format != LATENT_INDEX:
            raise PluginError(
                f"cache format {context.format!r} has no place for the keys of an index",
                fix=f"use the format {LATENT_INDEX!r}",
            )
        for layer in context.layers:
            own = layer.index_from is None
            if not layer.mla or layer.num_kv_heads != 1 or (own and not _index_shape(layer)):
                raise PluginError(
                    f"layer {layer.name!r} (kind {layer.kv_kind!r}, mla={layer.mla}, inputs "
                    f"{[each.name for each in layer.inputs]}) keeps no latents with an index",
                    fix=f"such a layer has mla=True, one KV head and an input {INDEX_KEY!r}; give others to 'mla'",
                )

    def tensors(self, layer: AttentionLayer) -> tuple[CacheTensor, ...]:
        dtype = self._context.kv_dtype
        latents = CacheTensor("key", dtype, (1, layer.head_size), by_head=True)
        if layer.index_from is not None:
            return (latents,)
        return latents, CacheTensor(INDEX_KEY, dtype, _index_shape(layer))


def _index_shape(layer: AttentionLayer) -> tuple[int, ...]:
    """Return the shape of one token's key of the layer's index, () for a layer without one."""
    return next((each.shape for each in layer.inputs if each.name == INDEX_KEY), ())
