"""FlashAttention 3 as an attention backend (Shah et al. 2024), for Hopper.

Written from the interface of its package, `flash_attn_interface`. It has not run on a machine with that package yet.
"""

from __future__ import annotations

import torch
from flash_attn_interface import flash_attn_with_kvcache

from slotline.backends.flash_attn.common import FlashBackend, Part, shared_arguments
from slotline.registry.contracts.attention import AttentionBatch, AttentionLayer, KVCache


class FlashAttn3Backend(FlashBackend):
    """Paged attention by FlashAttention 3: one function for equal and unequal query lengths, pages of any size."""

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, cache: KVCache, batch: AttentionBatch, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        equal = part.query_len > 0
        found, lse, *_ = flash_attn_with_kvcache(
            query.unflatten(0, (-1, part.query_len)) if equal else query,
            cache.key,
            cache.value,
            cache_seqlens=batch.seq_lens[part.first : part.end],
            page_table=batch.block_table[part.first : part.end],
            cu_seqlens_q=None if equal else part.query_starts,
            max_seqlen_q=None if equal else part.longest,
            return_softmax_lse=True,
            **shared_arguments(layer, batch),
        )
        if equal:  # lse: [requests, num_heads, query_len]
            return found.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        return found, lse.T  # lse: [num_heads, tokens]
