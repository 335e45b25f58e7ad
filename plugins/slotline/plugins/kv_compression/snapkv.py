"""SnapKV: tokens matter that the last tokens of a prompt attend to, and those beside them (Li et al., 2404.14469)."""

from __future__ import annotations

import torch
from torch.nn.functional import avg_pool1d

from slotline.registry.contracts import AttentionLayer, KVCompressorContext
from slotline.registry.errors import ConfigError


class SnapKV:
    """Ranks tokens by how much the prompt's last tokens attend to them, averaged over neighbours.

    The last tokens stay. Query heads of one KV head are averaged, since they share its cache. ``kernel`` among the
    options is the number of neighbours, 5 by default, as in the authors' code.
    """

    window = 32

    def __init__(self, context: KVCompressorContext) -> None:
        unknown = sorted(set(context.options) - {"kernel"})
        kernel = context.options.get("kernel", 5)
        if unknown or not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
            raise ConfigError(
                f"options of snapkv are {dict(context.options)!r}",
                fix="give kernel, an odd number of tokens, or none",
            )
        self.kernel = kernel

    def importance(
        self, layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        """See `slotline.registry.contracts.kv_compression.KVCompressor`."""
        assert scores is not None  # `window` asks for them
        pooled = avg_pool1d(scores.T[None], self.kernel, stride=1, padding=self.kernel // 2)[0].T
        pooled[max(0, len(pooled) - self.window) :] = torch.inf
        return pooled
