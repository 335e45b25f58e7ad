"""Common parts of the paged cache specs whose formats have tensors by name."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from slotline.plugins.kv_specs.paged import PagedSpec
from slotline.registry.cache_pages import bind_tensors, block_bytes
from slotline.registry.contracts.attention import AttentionLayer, LayerCache
from slotline.registry.contracts.cache_tensors import CacheTensor

if TYPE_CHECKING:
    import torch


class NamedTensorsSpec(PagedSpec):
    """Lays out tensors in kernel blocks. Implements `TensorSpec`, but for the rules of a kind of layers."""

    @abstractmethod
    def tensors(self, layer: AttentionLayer) -> tuple[CacheTensor, ...]:
        """Return the tensors of a layer."""

    def page_bytes(self, layer: AttentionLayer) -> int:
        return self._kernel_blocks(1) * block_bytes(self.tensors(layer), self._context.kernel_block_size)

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> LayerCache:
        size, layout = self._context.kernel_block_size, self._context.layout
        return bind_tensors(raw, self.tensors(layer), self._kernel_blocks(num_blocks), size, layout)

    def _kernel_blocks(self, num_blocks: int) -> int:
        return num_blocks * (self._context.block_size // self._context.kernel_block_size)
