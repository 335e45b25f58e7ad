"""A cache of all tokens, in Acme's order: the keys of every block of a layer, then the values of every block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slotline.registry.contracts import AttentionLayer, BlockHash, KVCache, KVSpecContext


class FullCache:
    """Blocks of `block_size` tokens, a multiple of 48, seen by kernels as blocks of `kernel_block_size`."""

    def __init__(self, context: KVSpecContext) -> None:
        self._tokens = context.block_size
        self._kernel_tokens = context.kernel_block_size
        self._heads_first = context.layout == "HND"
        self._dtype: torch.dtype = getattr(torch, context.kv_dtype)
        self._longest = context.max_model_len

    def page_bytes(self, layer: AttentionLayer) -> int:
        elements = layer.num_kv_heads * (layer.head_size + layer.head_size_v)
        return self._tokens * elements * self._dtype.itemsize

    def blocks_needed(self, num_tokens: int) -> int:
        full, rest = divmod(num_tokens, self._tokens)
        return full + (rest > 0)

    def max_blocks_held(self) -> int:
        return self.blocks_needed(self._longest)

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return 0

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Callable[[BlockHash], int | None]) -> list[int]:
        blocks: list[int] = []
        while len(blocks) < len(hashes) and (block := lookup(hashes[len(blocks)])) is not None:
            blocks.append(block)
        return blocks

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        elements = raw.view(self._dtype)
        keys = num_blocks * self._tokens * layer.num_kv_heads * layer.head_size
        return KVCache(
            key=self._plane(elements[:keys], layer.num_kv_heads, layer.head_size),
            value=self._plane(elements[keys:], layer.num_kv_heads, layer.head_size_v),
        )

    def _plane(self, elements: torch.Tensor, num_heads: int, head_size: int) -> torch.Tensor:
        """[num_kernel_blocks, kernel_block_size, num_heads, head_size] over the keys, or values, of every block."""
        if self._heads_first:
            return elements.view(-1, num_heads, self._kernel_tokens, head_size).transpose(1, 2)
        return elements.view(-1, self._kernel_tokens, num_heads, head_size)
