"""The newest tokens stay, beside the first ones: what a window with attention sinks sees (Xiao et al., 2309.17453)."""

from __future__ import annotations

import torch

from slotline.registry.contracts import AttentionLayer, KVCompressorContext


class Newest:
    """Ranks tokens by position. The measure for methods that look at what they keep."""

    window = 0

    def __init__(self, context: KVCompressorContext) -> None:
        pass

    def importance(
        self, layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        """See `slotline.registry.contracts.kv_compression.KVCompressor`."""
        places = torch.arange(len(keys), dtype=torch.float32, device=keys.device)
        return places[:, None].expand(-1, keys.shape[1])
