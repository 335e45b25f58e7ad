"""FlashAttention 2 behind the attention contract (Dao 2023, FlashAttention-2; flash-decoding for short queries)."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from slotline.backends.flash_attn.common import FlashBackend, Part, shared_arguments
from slotline.registry.contracts.attention import AttentionBatch, AttentionLayer, KVCache


class FlashAttnBackend(FlashBackend):
    """Paged attention by FlashAttention 2."""

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, cache: KVCache, batch: AttentionBatch, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared = shared_arguments(layer, batch) | {"block_table": batch.block_table[part.first : part.end]}
        if part.query_len:
            found, lse = flash_attn_with_kvcache(
                query.unflatten(0, (-1, part.query_len)),
                cache.key,
                cache.value,
                cache_seqlens=batch.seq_lens[part.first : part.end],
                return_softmax_lse=True,
                **shared,
            )
            return found.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)  # lse: [requests, num_heads, query_len]
        found, lse, _ = flash_attn_varlen_func(
            query,
            cache.key,
            cache.value,
            part.query_starts,
            part.key_starts,
            part.longest,
            batch.max_seq_len,
            return_attn_probs=True,
            **shared,
        )
        return found, lse.T  # lse: [num_heads, tokens]
