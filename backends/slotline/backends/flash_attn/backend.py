"""FlashAttention 2 as an attention backend (Dao 2023, FlashAttention-2, with flash-decoding for short queries)."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from slotline.backends.alibi import slopes_of
from slotline.backends.flash_attn.common import FlashBackend, Part, shared_arguments
from slotline.backends.keys_ahead import through_torch
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache


class FlashAttnBackend(FlashBackend):
    """Paged attention by FlashAttention 2.

    It counts ALiBi from the request's first key, which changes no weight: the log-sum-exp is mended.
    """

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._slopes = slopes_of(context)

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, cache: KVCache, batch: AttentionBatch, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared = shared_arguments(layer, batch) | {"block_table": batch.block_table[part.first : part.end]}
        if self._slopes is not None:
            shared["alibi_slopes"] = self._slopes
        if part.query_len:
            found, lse = flash_attn_with_kvcache(
                query.unflatten(0, (-1, part.query_len)),
                cache.key,
                cache.value,
                cache_seqlens=batch.seq_lens[part.first : part.end],
                return_softmax_lse=True,
                **shared,
            )
            norms = lse.transpose(1, 2).flatten(0, 1)  # of [requests, num_heads, query_len]
            return found.flatten(0, 1), self._from_own_key(norms, batch, part)
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
        return found, self._from_own_key(lse.T, batch, part)  # lse: [num_heads, tokens]

    def _from_own_key(self, lse: torch.Tensor, batch: AttentionBatch, part: Part) -> torch.Tensor:
        """Return the log-sum-exp [tokens, num_heads] with distances counted from the query's own key."""
        if self._slopes is None:
            return lse
        return lse - batch.positions[part.first_token : part.end_token, None] * self._slopes


build = through_torch(FlashAttnBackend)
