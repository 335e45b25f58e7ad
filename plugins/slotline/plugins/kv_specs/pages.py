"""Memory layout of a page of keys and values.

One manager block of one layer is a *page*. It is `ratio` consecutive kernel blocks, and each kernel block holds its
keys, then its values. With equal head sizes the memory is therefore, outermost first,

* ``NHD``: [num_blocks * ratio, 2, kernel_block_size, num_kv_heads, head_size]
* ``HND``: [num_blocks * ratio, 2, num_kv_heads, kernel_block_size, head_size]

so a page is contiguous in both layouts, and can be copied or shared as bytes. If groups with different page sizes share
the pool, its kernel blocks are separate instead: each is contiguous, at a fixed distance.

A page of latents is [num_blocks * ratio, kernel_block_size, head_size]. It has no values of its own.
"""

from __future__ import annotations

import torch

from slotline.registry.contracts.attention import AttentionLayer, KVCache
from slotline.registry.errors import CapacityError, PluginError


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype called `name`. Raises PluginError for a name that torch does not know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PluginError(f"cache dtype {name!r} is no torch dtype", fix="use a name such as 'bfloat16'")
    return dtype


def token_bytes(layer: AttentionLayer, dtype: torch.dtype) -> int:
    """Return the bytes of one token's key and value in `layer`."""
    return layer.num_kv_heads * (layer.head_size + layer.head_size_v) * dtype.itemsize


def latent_bytes(layer: AttentionLayer, dtype: torch.dtype) -> int:
    """Return the bytes of one token's latent in `layer`."""
    return layer.head_size * dtype.itemsize


def bind_pages(
    raw: torch.Tensor, layer: AttentionLayer, dtype: torch.dtype, num_kernel_blocks: int, size: int, layout: str
) -> KVCache:
    """View `raw` (uint8, exactly the bytes of `num_kernel_blocks` kernel blocks of `size` tokens) as a cache.

    `raw` is flat, or has a row for each kernel block, and rows may lie apart.

    Raises CapacityError if `raw` has another size, PluginError for an unknown `layout`.
    """
    blocks = _blocks(raw, layer, dtype, num_kernel_blocks, size, token_bytes(layer, dtype))  # [., elements of K and V]
    split = size * layer.num_kv_heads * layer.head_size
    heads = layer.num_kv_heads
    return KVCache(
        _logical(blocks[:, :split], size, heads, layer.head_size, layout),
        _logical(blocks[:, split:], size, heads, layer.head_size_v, layout),
    )


def bind_latents(
    raw: torch.Tensor, layer: AttentionLayer, dtype: torch.dtype, num_kernel_blocks: int, size: int
) -> KVCache:
    """View `raw` as the latents of an MLA layer. The values are the first `head_size_v` numbers of the keys.

    Raises CapacityError if `raw` has another size than `num_kernel_blocks` kernel blocks of `size` tokens.
    """
    blocks = _blocks(raw, layer, dtype, num_kernel_blocks, size, latent_bytes(layer, dtype))
    keys = blocks.view(num_kernel_blocks, size, 1, layer.head_size)
    return KVCache(keys, keys[..., : layer.head_size_v])


def _blocks(
    raw: torch.Tensor, layer: AttentionLayer, dtype: torch.dtype, num_kernel_blocks: int, size: int, each: int
) -> torch.Tensor:
    """View `raw` as [num_kernel_blocks, elements], for `each` bytes per token."""
    expected = num_kernel_blocks * size * each
    if raw.numel() != expected or (raw.dim() == 2 and raw.shape[0] != num_kernel_blocks):
        raise CapacityError(
            f"layer {layer.name!r}: the cache buffer has {raw.numel()} bytes, {num_kernel_blocks} kernel blocks of "
            f"{size} tokens need {expected}",
            fix="allocate num_blocks * page_bytes(layer)",
        )
    rows = raw if raw.dim() == 2 else raw.view(num_kernel_blocks, -1)
    return rows.view(dtype)


def _logical(part: torch.Tensor, size: int, num_kv_heads: int, head_size: int, layout: str) -> torch.Tensor:
    """View [num_kernel_blocks, size * num_kv_heads * head_size] with a dimension each for size, heads and elements."""
    if layout == "NHD":
        return part.view(-1, size, num_kv_heads, head_size)
    if layout == "HND":
        return part.view(-1, num_kv_heads, size, head_size).transpose(1, 2)
    raise PluginError(f"cache layout {layout!r} is unknown", fix="use 'NHD' or 'HND'")
