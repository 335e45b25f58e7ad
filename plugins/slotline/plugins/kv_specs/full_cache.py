"""The `full` cache spec: one block for every `block_size` tokens, none freed before the request ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slotline.plugins.kv_specs.pages import bind_pages, dtype_of, token_bytes
from slotline.registry.contracts.attention import AttentionLayer, KVCache
from slotline.registry.contracts.kv_spec import BlockHash, KVSpecContext
from slotline.registry.errors import PluginError

if TYPE_CHECKING:
    import torch


class FullSpec:
    """Answers the pool's questions for layers that keep every token. Implements `KVSpec`."""

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

    def max_blocks_held(self) -> int:
        return self.blocks_needed(self._context.max_model_len)

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return 0

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Callable[[BlockHash], int | None]) -> list[int]:
        blocks: list[int] = []
        for block_hash in hashes:
            block = lookup(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        size = self._context.kernel_block_size
        num_kernel_blocks = num_blocks * (self._context.block_size // size)
        return bind_pages(raw, layer, self._dtype, num_kernel_blocks, size, self._context.layout)
