"""Common parts of the paged cache specs: pages of keys and values, and one block per block size of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slotline.plugins.kv_specs.pages import bind_pages, dtype_of, token_bytes
from slotline.registry.contracts.attention import AttentionLayer, LayerCache
from slotline.registry.contracts.kv_spec import KVSpecContext
from slotline.registry.errors import PluginError

if TYPE_CHECKING:
    import torch


class PagedSpec:
    """Pages and the length of a table. Each spec defines which blocks are freed and found again.

    Raises PluginError if the kernel block size does not divide the block size.
    """

    def __init__(self, context: KVSpecContext) -> None:
        if context.block_size % context.kernel_block_size:
            raise PluginError(
                f"kernel block size {context.kernel_block_size} does not divide block size {context.block_size}",
                fix="choose a block size that is a multiple of the kernel block size",
            )
        self._context = context
        self._dtype = dtype_of(context.kv_dtype)

    def page_bytes(self, layer: AttentionLayer) -> int:
        return self._context.block_size * token_bytes(layer, self._dtype)

    def blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self._context.block_size)

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> LayerCache:
        size = self._context.kernel_block_size
        num_kernel_blocks = num_blocks * (self._context.block_size // size)
        return bind_pages(raw, layer, self._dtype, num_kernel_blocks, size, self._context.layout)
