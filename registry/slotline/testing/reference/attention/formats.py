"""Attention over caches of codes with scales, written for clarity."""

from __future__ import annotations

import torch

from slotline.registry.contracts.attention import AttentionContext, AttentionLayer
from slotline.registry.contracts.cache_tensors import CacheTensors
from slotline.testing.oracles import cache_formats
from slotline.testing.reference.attention.backend import EagerAttention, Plan, raw


class CodedAttention(EagerAttention):
    """The textbook formula over decoded keys and values. Mutants change one of its steps."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.format = context.cache_format
        self.sizes = context.layers[0].head_size, context.layers[0].head_size_v

    def write(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: CacheTensors,  # type: ignore[override]
        plan: Plan,
    ) -> None:
        """Store the codes and scales of the step's tokens, except those with slot -1."""
        slots = plan.slot_mapping[: plan.starts[-1]]
        kept = slots >= 0
        place = (slots[kept] // self.block_size, slots[kept] % self.block_size)
        for name, new in (("key", key), ("value", value)):
            codes, scale = self.encode(new[: len(slots)][kept], cache[name].dtype)
            raw(cache[name])[place] = raw(codes)
            self.put_scale(cache[f"{name}_scale"], place, scale)

    def put_scale(self, stored: torch.Tensor, place: tuple[torch.Tensor, ...], scale: torch.Tensor) -> None:
        """Store scales [n, Hkv] at their places."""
        stored[place] = scale

    def encode(self, vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of vectors [n, Hkv, D]."""
        return cache_formats.encode(vectors, self.format, dtype)

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        """Return the vectors [n, Hkv, size] of codes and scales [n, Hkv]."""
        return cache_formats.decode(codes, scale, self.format, size)

    def scale_names(self) -> tuple[str, str]:
        """Return the names of the scales of keys and of values."""
        return "key_scale", "value_scale"

    def gather(
        self,
        cache: CacheTensors,  # type: ignore[override]
        plan: Plan,
        request: int,
        first: int,
        length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(first, length, device=cache.key.device)
        place = (self.blocks(plan, request, positions // self.block_size), positions % self.block_size)
        keys, values = (
            self.decode(raw(cache[name])[place].view(cache[name].dtype), cache[scale][place], size)
            for name, scale, size in zip(("key", "value"), self.scale_names(), self.sizes, strict=True)
        )
        return keys, values
