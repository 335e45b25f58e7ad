"""An attention backend whose kernel takes pages of multiples of 256 tokens, as FlashAttention-2's paged kernels do.

It exists to show negotiation: against `cache.block_size = 16` it is refused, against `auto` the block grows to 256.
"""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry import Align, Choice, Descriptor, Kind, Range, Set
from slotline.registry.contracts import AttentionBatch, AttentionCapabilities, AttentionContext, AttentionLayer, KVCache


class PagesOf256:
    """Gathers each request's pages and lets torch compute."""

    descriptor = Descriptor(
        kind=Kind.ATTENTION,
        name="pages_of_256",
        summary="pages of 256 tokens",
        factory="",
        capabilities=AttentionCapabilities(
            devices=Set({"cpu", "cuda"}),
            dtypes=Set({("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")}),
            head_sizes=Range(8, 256, 8),
            kernel_block_sizes=Align(multiple_of=256),
            layouts=Choice(("NHD",)),
        ),
    )

    def __init__(self, context: AttentionContext) -> None:
        self._size = context.kernel_block_size

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        """Nothing to prepare."""
        return batch

    def write(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, batch: AttentionBatch
    ) -> None:
        """Store the new keys and values where a slot says so."""
        kept = batch.slot_mapping >= 0
        block, offset = batch.slot_mapping[kept] // self._size, batch.slot_mapping[kept] % self._size
        cache.key[block, offset] = key[: len(kept)][kept]
        cache.value[block, offset] = value[: len(kept)][kept]

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        out: torch.Tensor,
        sinks: Any = None,
    ) -> None:
        """Request by request."""
        bounds = batch.query_start_loc_cpu.tolist()
        for i, length in enumerate(batch.seq_lens_cpu.tolist()):
            first, last = bounds[i], bounds[i + 1]
            blocks = batch.block_table[i, : -(-length // self._size)].long()
            keys, values = (part[blocks].flatten(0, 1)[:length].transpose(0, 1) for part in cache)
            position = torch.arange(length - (last - first), length, device=query.device)[:, None]
            mask = torch.arange(length, device=query.device) <= position
            out[first:last] = torch.nn.functional.scaled_dot_product_attention(
                query[first:last].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=mask,
                scale=layer.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
