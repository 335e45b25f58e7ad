"""Cache pages of a vLLM backend: opaque bytes for the pool, and the tensor that the backend knows for the backend."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from slotline.plugins.kv_specs.full_cache import FullSpec
from slotline.registry.cache_pages import bind_tensors, block_bytes
from slotline.registry.contracts.attention import AttentionLayer, LayerCache
from slotline.registry.contracts.cache_tensors import CacheTensor
from slotline.registry.contracts.kv_spec import KVSpecContext

if TYPE_CHECKING:
    import torch

FORMAT = "vllm"
"""Format of caches: one tensor of bytes for each kernel block, whose meaning the backend knows."""
NAME = "page"
CACHE_NAMES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
"""vLLM's names of eight-bit caches. Others are ``auto``, the dtype of the activations."""
ALIGNMENT = 64
"""Bytes. vLLM's kernels take cache pages to be aligned like allocations."""
_FEW, _MANY = 7, 11
"""Two numbers of blocks, by which the dimension that counts blocks is found in a shape."""


class OpaquePages(FullSpec):
    """Blocks of a vLLM backend's own layout, all kept until the request ends. Implements `TensorSpec`.

    Args:
        backend: the class with vLLM's interface.
        context: the contract's context.
    """

    def __init__(self, backend: Any, context: KVSpecContext) -> None:
        super().__init__(context)
        self._backend = backend

    def tensors(self, layer: AttentionLayer) -> tuple[CacheTensor, ...]:
        context = self._context
        page = Page(self._backend, layer, context.kv_dtype, context.kernel_block_size, context.layout)
        return (CacheTensor(NAME, "uint8", (page.bytes,), per="block", alignment=ALIGNMENT),)

    def page_bytes(self, layer: AttentionLayer) -> int:
        return self._kernel_blocks(1) * block_bytes(self.tensors(layer), self._context.kernel_block_size)

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> LayerCache:
        size, layout = self._context.kernel_block_size, self._context.layout
        return bind_tensors(raw, self.tensors(layer), self._kernel_blocks(num_blocks), size, layout)

    def _kernel_blocks(self, num_blocks: int) -> int:
        return num_blocks * (self._context.block_size // self._context.kernel_block_size)


class Page:
    """Page of one layer in a vLLM backend's layout.

    Args:
        backend: the class with vLLM's interface.
        layer: the layer.
        kv_dtype: name of the cache's dtype.
        block_size: tokens of a page.
        layout: order inside a page, ``NHD`` or ``HND``. A class with `get_kv_cache_shape` has its own.

    Attributes:
        bytes: size of a page.
    """

    def __init__(self, backend: Any, layer: AttentionLayer, kv_dtype: str, block_size: int, layout: str) -> None:
        self._dtype = element(kv_dtype)
        self._layout, self._shape = layout, None
        if hasattr(backend, "get_kv_cache_shape"):
            self._shape, self._order = _own_shape(backend, layer, kv_dtype, block_size)
            self.bytes = prod(self._shape[1:]) * self._dtype.itemsize
            return
        spec = page_spec(backend, layer, self._dtype, block_size)
        self._heads, self._tokens = spec.num_heads, spec.num_states
        self._dtype = getattr(spec, "dtype", self._dtype)
        self.bytes = spec.page_size_bytes

    def view(self, page: torch.Tensor) -> torch.Tensor:
        """Return the cache as the backend knows it, of the bytes of its pages [num_kernel_blocks, bytes]."""
        rows = page[:, : self.bytes].view(self._dtype)
        if self._shape is not None:
            return rows.view(len(rows), *self._shape[1:]).permute(self._order)
        outer = (self._tokens, self._heads) if self._layout == "NHD" else (self._heads, self._tokens)
        view = rows.unflatten(1, (*outer, -1))
        found: torch.Tensor = view.transpose(1, 2) if self._layout == "NHD" else view
        return found


def element(kv_dtype: str) -> torch.dtype:
    """Return the dtype of the tensor that a vLLM backend gets for a cache dtype: bytes for eight-bit floats."""
    import torch

    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    name = CACHE_NAMES.get(kv_dtype)
    found: torch.dtype = getattr(torch, kv_dtype) if name is None else STR_DTYPE_TO_TORCH_DTYPE[name]
    return found


def page_spec(backend: Any, layer: AttentionLayer, dtype: Any, block_size: int) -> Any:
    """Return vLLM's spec of a layer's cache, as the backend wants it packed."""
    from vllm.v1 import kv_cache_interface as vllm

    facts = {
        "block_size": block_size,
        "num_kv_heads": layer.num_kv_heads,
        "head_size": layer.head_size,
        "dtype": dtype,
    }
    if layer.attention_type == "encoder_only":
        return vllm.EncoderOnlyAttentionSpec(**facts)
    if layer.window is not None:
        spec = vllm.SlidingWindowSpec(**facts, sliding_window=layer.window)
    else:
        spec = vllm.FullAttentionSpec(**facts)
    return getattr(backend, "customize_spec", lambda spec: spec)(spec)


def _own_shape(
    backend: Any, layer: AttentionLayer, kv_dtype: str, block_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the physical shape of a cache with blocks first, and the permutation to the shape that the class names."""
    shapes = [
        tuple(backend.get_kv_cache_shape(count, block_size, layer.num_kv_heads, layer.head_size))
        for count in (_FEW, _MANY)
    ]
    blocks = next(i for i, (few, many) in enumerate(zip(*shapes, strict=True)) if few != many)
    try:
        order = list(backend.get_kv_cache_stride_order())
    except (AttributeError, NotImplementedError):
        order = list(range(len(shapes[0])))
    order.remove(blocks)
    order.insert(0, blocks)
    physical = tuple(shapes[0][dim] for dim in order)
    return physical, tuple(order.index(dim) for dim in range(len(order)))
