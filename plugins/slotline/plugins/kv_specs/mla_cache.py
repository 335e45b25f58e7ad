"""The `mla` cache spec: latents of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token has one vector for all heads: the latent, `head_size_v` numbers from which keys and values are made, then the
part of the keys that carries positions. A kernel block is [kernel_block_size, head_size] in either layout, since there
is one head. The values are a view of the keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slotline.plugins.kv_specs.full_cache import FullSpec
from slotline.plugins.kv_specs.pages import bind_latents, latent_bytes
from slotline.registry.contracts.attention import AttentionLayer, KVCache
from slotline.registry.contracts.kv_spec import KVSpecContext
from slotline.registry.errors import PluginError

if TYPE_CHECKING:
    import torch


class MLASpec(FullSpec):
    """Answers the pool's questions for layers that keep one latent of every token. Implements `KVSpec`.

    Raises PluginError for a layer that keeps keys and values.
    """

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        for layer in context.layers:
            if not layer.mla or layer.num_kv_heads != 1 or layer.head_size_v > layer.head_size:
                raise PluginError(
                    f"layer {layer.name!r} (kind {layer.kv_kind!r}, {layer.num_kv_heads} KV heads of "
                    f"{layer.head_size}/{layer.head_size_v}, mla={layer.mla}) keeps no latents",
                    fix="an MLA layer has mla=True, one KV head, and values no longer than keys; give others to 'full'",
                )

    def page_bytes(self, layer: AttentionLayer) -> int:
        return self._context.block_size * latent_bytes(layer, self._dtype)

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        size = self._context.kernel_block_size
        num_kernel_blocks = num_blocks * (self._context.block_size // size)
        return bind_latents(raw, layer, self._dtype, num_kernel_blocks, size)
