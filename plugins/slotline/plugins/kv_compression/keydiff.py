"""KeyDiff: keys that resemble the others matter least (Park et al., arXiv 2504.15364)."""

from __future__ import annotations

import torch
from torch.nn.functional import cosine_similarity, normalize

from slotline.registry.contracts import AttentionLayer, KVCompressorContext


class KeyDiff:
    """Ranks tokens by how little their key resembles the mean key of their head.

    The mean is that of the keys at length one, as in algorithm 1 of the paper. Attention scores are not read, so any
    attention backend serves.
    """

    window = 0

    def __init__(self, context: KVCompressorContext) -> None:
        pass

    def importance(
        self, layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        """See `slotline.registry.contracts.kv_compression.KVCompressor`."""
        keys = keys.float()
        anchor = normalize(keys, dim=-1).mean(0, keepdim=True)  # [1, num_kv_heads, head_size]
        return -cosine_similarity(keys, anchor, dim=-1)
