"""Right cache specs that differ from the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slotline.registry.contracts import AttentionLayer, BlockHash, KVCache, KVSpecContext
from slotline.testing.reference.kv_spec import WindowedSpec

Lookup = Callable[[BlockHash], int | None]


class InterleavedPadded(WindowedSpec):
    """Each token's key next to its value, kernel blocks padded to 64 bytes, one block kept beyond the window."""

    def kernel_bytes(self, layer: AttentionLayer) -> int:
        """Bytes of one kernel block, padding included."""
        used = self.context.kernel_block_size * self.token_elements(layer) * self.dtype.itemsize
        return -(-used // 64) * 64

    def page_bytes(self, layer: AttentionLayer) -> int:
        return self.block_size // self.context.kernel_block_size * self.kernel_bytes(layer)

    def first_read(self, num_computed_tokens: int) -> int:
        return super().first_read(num_computed_tokens) - self.block_size

    def max_blocks_held(self) -> int:
        return min(super().max_blocks_held() + 1, self.blocks_needed(self.context.max_model_len))

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Lookup) -> list[int]:
        return WindowedSpec(self.context).prefix_hit(hashes, lookup)  # the block beyond is kept, but not asked for

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        size, heads, both = self.context.kernel_block_size, layer.num_kv_heads, layer.head_size + layer.head_size_v
        padded = raw.view(-1, self.kernel_bytes(layer)).view(self.dtype)  # [num_kernel_blocks, elements and padding]
        pair = self.view(padded[:, : size * heads * both], heads, both)
        return KVCache(pair[..., : layer.head_size], pair[..., layer.head_size :])


class Planes(WindowedSpec):
    """All keys of a layer before all values, in whole blocks. Keeps every token."""

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        self.window = None

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        keys, values = (
            num_blocks * self.block_size * layer.num_kv_heads * n for n in (layer.head_size, layer.head_size_v)
        )
        elements = raw.view(self.dtype)
        return KVCache(
            self.view(elements[:keys].view(num_blocks, -1), layer.num_kv_heads, layer.head_size),
            self.view(elements[keys : keys + values].view(num_blocks, -1), layer.num_kv_heads, layer.head_size_v),
        )


class Latents(WindowedSpec):
    """One latent for each token, which holds its value."""

    def token_elements(self, layer: AttentionLayer) -> int:
        return layer.head_size

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        kernel_blocks = num_blocks * (self.block_size // self.context.kernel_block_size)
        keys = self.view(raw.view(self.dtype).view(kernel_blocks, -1), 1, layer.head_size)
        return KVCache(keys, self.values(keys, layer))

    def values(self, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Their part of the keys."""
        return keys[..., : layer.head_size_v]


class OneBlock(WindowedSpec):
    """A kind of its own: a summary of fixed size, so that a request has one block at any length."""

    def blocks_needed(self, num_tokens: int) -> int:
        return min(num_tokens, 1)

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return 0
