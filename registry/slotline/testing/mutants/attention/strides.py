"""Mutants that read query, key or value by the strides of a tensor that lies in one piece, or of another input."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.contracts.attention import AttentionLayer, KVCache
from slotline.testing.check import Level
from slotline.testing.mutants.attention.making import mutant
from slotline.testing.reference.attention.backend import EagerAttention


def in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a kernel reads from the tensor's address that computes strides from its shape."""
    _, heads, size = tensor.shape
    return _read(tensor, (heads * size, size, 1))


def _read(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    if tensor.numel() == 0 or last >= tensor.untyped_storage().nbytes() // tensor.itemsize:
        return tensor.contiguous()  # behind the memory, where a kernel would read what belongs to others
    return tensor.as_strided(tensor.shape, strides)


class ContiguousQuery(EagerAttention):
    def forward(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any
    ) -> torch.Tensor | None:
        return super().forward(layer, in_one_piece(query), key, value, *more)


class ContiguousKey(EagerAttention):
    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Any) -> None:
        super().write(layer, in_one_piece(key), value, cache, plan)


class ContiguousValue(EagerAttention):
    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Any) -> None:
        super().write(layer, key, in_one_piece(value), cache, plan)


class KeyStridesForValues(EagerAttention):
    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Any) -> None:
        alike = key.shape == value.shape
        super().write(layer, key, _read(value, key.stride()) if alike else value, cache, plan)


class RowsApart(EagerAttention):
    def forward(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any
    ) -> torch.Tensor | None:
        rows = query.shape[1] * query.shape[2]
        odd = query.stride(0) != rows
        return super().forward(layer, query.roll(1, 0) if odd else query, key, value, *more)


MUTANTS = (
    mutant("contiguous-query", Level.HOSTILE, "reads the query as if it lay in one piece", ContiguousQuery),
    mutant("contiguous-key", Level.HOSTILE, "reads new keys as if they lay in one piece", ContiguousKey),
    mutant("contiguous-value", Level.HOSTILE, "reads new values as if they lay in one piece", ContiguousValue),
    mutant("key-strides", Level.HOSTILE, "reads new values by the strides of keys", KeyStridesForValues),
    mutant("rows-apart", Level.HOSTILE, "takes the row before where rows have gaps", RowsApart),
)
