"""Cache specs that are wrong about pages and memory."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from slotline.registry.contracts import AttentionLayer, BlockHash, KVCache, KVSpecContext
from slotline.testing.mutants.kv_spec import right
from slotline.testing.reference.kv_spec import WindowedSpec

Lookup = Callable[[BlockHash], int | None]

# --- pages


class ForgetsValues(WindowedSpec):
    def page_bytes(self, layer: AttentionLayer) -> int:
        return self.block_size * layer.num_kv_heads * layer.head_size * self.dtype.itemsize


class PageOfKernelBlock(WindowedSpec):
    def page_bytes(self, layer: AttentionLayer) -> int:
        return self.context.kernel_block_size * self.token_elements(layer) * self.dtype.itemsize


class TwoBytesAlways(WindowedSpec):
    def page_bytes(self, layer: AttentionLayer) -> int:
        return self.block_size * self.token_elements(layer) * 2


class ValueHeadLikeKeyHead(WindowedSpec):
    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        return super().bind(raw, attrs.evolve(layer, head_size_v=layer.head_size), num_blocks)

    def page_bytes(self, layer: AttentionLayer) -> int:
        return super().page_bytes(attrs.evolve(layer, head_size_v=layer.head_size))


class LastDtypeForAll(WindowedSpec):
    shared: torch.dtype

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        LastDtypeForAll.shared = self.dtype

    def page_bytes(self, layer: AttentionLayer) -> int:
        return self.block_size * self.token_elements(layer) * LastDtypeForAll.shared.itemsize


class LatentsBesideValues(right.Latents):
    """Gives values memory of their own after all latents."""

    def token_elements(self, layer: AttentionLayer) -> int:
        return layer.head_size + layer.head_size_v

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        return WindowedSpec.bind(self, raw, layer, num_blocks)


class LatentsBehindPositions(right.Latents):
    def values(self, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return keys[..., -layer.head_size_v :]


# --- bind


class IgnoresLayout(WindowedSpec):
    def view(self, part: torch.Tensor, num_kv_heads: int, head_size: int) -> torch.Tensor:
        return part.view(-1, self.context.kernel_block_size, num_kv_heads, head_size)


class WholeBlocksOnly(WindowedSpec):
    def view(self, part: torch.Tensor, num_kv_heads: int, head_size: int) -> torch.Tensor:
        whole = super().view(part, num_kv_heads, head_size)
        return whole[:: self.block_size // self.context.kernel_block_size]


class ValuesOverKeys(WindowedSpec):
    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        cache = super().bind(raw, layer, num_blocks)
        value = cache.value.as_strided(cache.value.shape, cache.value.stride(), cache.key.storage_offset())
        return KVCache(cache.key, value)


class BindsACopy(WindowedSpec):
    def view(self, part: torch.Tensor, num_kv_heads: int, head_size: int) -> torch.Tensor:
        return super().view(part, num_kv_heads, head_size).clone()


class BindsFromTheStoragesStart(WindowedSpec):
    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        return super().bind(raw.as_strided(raw.shape, (1,), 0), layer, num_blocks)


class PacksPages(WindowedSpec):
    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        return super().bind(raw.contiguous(), layer, num_blocks)


class OneBlockForAll(WindowedSpec):
    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        key, value = super().bind(raw, layer, num_blocks)
        return KVCache(key[:1].expand(key.shape), value)
