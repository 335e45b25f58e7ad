"""Cache spec for full and sliding layers, which frees blocks before the window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import AttentionLayer, BlockHash, KVCache, KVSpecCapabilities, KVSpecContext
from slotline.registry.descriptor import Descriptor, Kind


class WindowedSpec:
    """Spec of the layers of one group. The group's reach is its widest window. None sees everything.

    A page is its kernel blocks one after another. Each holds its keys, then its values.
    """

    def __init__(self, context: KVSpecContext) -> None:
        self.context = context
        self.block_size = context.block_size
        self.dtype: torch.dtype = getattr(torch, context.kv_dtype)
        windows = [layer.window for layer in context.layers]
        self.window = None if None in windows else max(window for window in windows if window is not None)

    def page_bytes(self, layer: AttentionLayer) -> int:
        return self.block_size * self.token_elements(layer) * self.dtype.itemsize

    def token_elements(self, layer: AttentionLayer) -> int:
        """Return the elements of one token's key and value."""
        return layer.num_kv_heads * (layer.head_size + layer.head_size_v)

    def blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_blocks_held(self) -> int:
        everything = self.blocks_needed(self.context.max_model_len)
        if self.window is None:
            return everything
        # The tokens in flight and the window - 1 before them may begin in the last slot of a block.
        tokens = self.window - 1 + self.context.max_tokens_in_flight
        return min(self.blocks_needed(tokens - 1) + 1, everything)

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return max(0, self.first_read(num_computed_tokens)) // self.block_size

    def first_read(self, num_computed_tokens: int) -> int:
        """Return the oldest position that the next token reads."""
        return 0 if self.window is None else num_computed_tokens - self.window + 1

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Callable[[BlockHash], int | None]) -> list[int]:
        cached = [lookup(block_hash) for block_hash in hashes]
        for length in range(len(hashes), 0, -1):
            first = self.first_kept(length)
            if all(block is not None for block in cached[first:length]):
                return [0] * first + [block for block in cached[first:length] if block is not None]
        return []

    def first_kept(self, length: int) -> int:
        """Return the first block that is read after a prefix of `length` blocks."""
        return self.blocks_freeable(length * self.block_size)

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        size = self.context.kernel_block_size
        kernel_blocks = num_blocks * (self.block_size // size)
        elements = raw.view(self.dtype).view(kernel_blocks, size * self.token_elements(layer))
        split = size * layer.num_kv_heads * layer.head_size
        return KVCache(
            self.view(elements[:, :split], layer.num_kv_heads, layer.head_size),
            self.view(elements[:, split:], layer.num_kv_heads, layer.head_size_v),
        )

    def view(self, part: torch.Tensor, num_kv_heads: int, head_size: int) -> torch.Tensor:
        """View [num_kernel_blocks, elements] as [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size]."""
        size = self.context.kernel_block_size
        if self.context.layout == "HND":
            return part.view(-1, num_kv_heads, size, head_size).transpose(1, 2)
        return part.view(-1, size, num_kv_heads, head_size)


descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="reference_windowed",
    summary="full and sliding layers; frees what the window has left",
    capabilities=KVSpecCapabilities(
        kv_kinds=Set(("full", "sliding")), exact_kinds=Set(("full", "sliding")), page_stride=Flag(True)
    ),
    factory=WindowedSpec,
)
