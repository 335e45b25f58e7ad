"""Memory of `CacheTensor`s: where each lies in a kernel block, and views of it. For authors of cache specs.

A kernel block holds its tensors one after another, each at a multiple of its alignment. Its size is a multiple of the
largest alignment, so that blocks can follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from slotline.registry.contracts.cache_tensors import CacheTensor, CacheTensors
from slotline.registry.errors import CapacityError, PluginError


def tensor_bytes(tensor: CacheTensor, kernel_block_size: int) -> int:
    """Return the bytes that a tensor takes in one kernel block of `kernel_block_size` tokens, without padding."""
    count = kernel_block_size if tensor.per == "token" else 1
    return count * prod(tensor.shape) * _dtype(tensor).itemsize


def block_bytes(tensors: Sequence[CacheTensor], kernel_block_size: int) -> int:
    """Return the bytes of one kernel block, padding included.

    Raises PluginError for tensors without a valid dtype, alignment or name.
    """
    return _places(tensors, kernel_block_size)[1]


def bind_tensors(
    raw: torch.Tensor, tensors: Sequence[CacheTensor], num_kernel_blocks: int, kernel_block_size: int, layout: str
) -> CacheTensors:
    """View `raw` as tensors by name, as `KVSpec.bind` returns them.

    Args:
        raw: uint8, flat or with a row for each kernel block, where rows may lie apart.
        tensors: those of one layer.
        num_kernel_blocks, kernel_block_size: of the cache.
        layout: ``NHD`` or ``HND``.

    Raises:
        CapacityError: if `raw` has another size.
        PluginError: for an unknown layout, or tensors that `block_bytes` refuses.
    """
    if layout not in ("NHD", "HND"):
        raise PluginError(f"cache layout {layout!r} is unknown", fix="use 'NHD' or 'HND'")
    places, size = _places(tensors, kernel_block_size)
    if raw.numel() != num_kernel_blocks * size or (raw.dim() == 2 and raw.shape[0] != num_kernel_blocks):
        raise CapacityError(
            f"the cache buffer has {raw.numel()} bytes, {num_kernel_blocks} kernel blocks of {kernel_block_size} "
            f"tokens need {num_kernel_blocks * size}",
            fix="allocate num_blocks * page_bytes(layer)",
        )
    rows = raw if raw.dim() == 2 else raw.view(num_kernel_blocks, size)
    found = {}
    for tensor, first in zip(tensors, places, strict=True):
        part = rows[:, first : first + tensor_bytes(tensor, kernel_block_size)].view(_dtype(tensor))
        found[tensor.name] = _shaped(part, tensor, kernel_block_size, layout)
    return CacheTensors(found)


def _places(tensors: Sequence[CacheTensor], kernel_block_size: int) -> tuple[list[int], int]:
    """Return the first byte of each tensor in a kernel block, and the block's bytes."""
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise PluginError("two tensors of a layer's cache have the same name", fix="give each a name of its own")
    places, at = [], 0
    for tensor in tensors:
        if tensor.alignment < 1 or tensor.alignment % _dtype(tensor).itemsize:
            raise PluginError(
                f"cache tensor {tensor.name!r} has alignment {tensor.alignment}",
                fix=f"use a multiple of the {_dtype(tensor).itemsize} bytes of {tensor.dtype}",
            )
        at = _aligned(at, tensor.alignment)
        places.append(at)
        at += tensor_bytes(tensor, kernel_block_size)
    return places, _aligned(at, max((tensor.alignment for tensor in tensors), default=1))


def _shaped(part: torch.Tensor, tensor: CacheTensor, kernel_block_size: int, layout: str) -> torch.Tensor:
    if tensor.per == "block":
        return part.view(len(part), *tensor.shape)
    if tensor.by_head and layout == "HND":
        return part.view(len(part), tensor.shape[0], kernel_block_size, *tensor.shape[1:]).transpose(1, 2)
    return part.view(len(part), kernel_block_size, *tensor.shape)


def _dtype(tensor: CacheTensor) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PluginError(
            f"cache tensor {tensor.name!r}: {tensor.dtype!r} is no torch dtype", fix="use a name such as 'uint8'"
        )
    return dtype


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
