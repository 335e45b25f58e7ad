"""Methods of the extension `kv_compression`: which tokens of a request stay in the cache.

A method says how much each cached token matters, for each layer and KV head by itself. The extension keeps those that
matter most, and the first and last tokens in any case. Keys lie in the cache after rotation, so a kept token needs its
position no more.

A configuration names a method by the path of its class::

    [extensions.kv_compression]
    method = "acme.compression:Newest"
    keep = 0.5

A complete method, which keeps the newest tokens::

    class Newest:
        window = 0

        def __init__(self, context):
            pass

        def importance(self, layer, keys, values, scores):
            return torch.arange(len(keys), device=keys.device)[:, None].expand(-1, keys.shape[1]).float()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from slotline.registry.contracts.attention import AttentionLayer

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class KVCompressorContext:
    """Input of a method's factory, which is called once for each engine.

    Attributes:
        layers: that own a cache. With a tensor group they have this rank's heads.
        options: the table ``options`` of the extension's own.
    """

    layers: tuple[AttentionLayer, ...]
    options: Mapping[str, Any] = field(factory=dict)


class KVCompressor(Protocol):
    """Method that chooses the tokens of a request that stay in the cache.

    Attributes:
        window: last tokens of a prompt whose attention scores `importance` reads. 0 for none. It is an attribute of the
            class, since it is read before anything is built. These tokens are computed in one step.
    """

    window: int

    def importance(
        self, layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        """Return how much each token matters to each KV head, [num_tokens, num_kv_heads] float32.

        Tokens with higher numbers are kept. Do not wait for the device. The answer must follow from the arguments, so
        that a request that is computed again keeps the same tokens.

        Args:
            layer: whose cache it is.
            keys: [num_tokens, num_kv_heads, head_size] in the dtype of the cache, after rotation, in order of position.
            values: [num_tokens, num_kv_heads, head_size_v], likewise.
            scores: [num_tokens, num_kv_heads] float32, the mean probability with which the last `window` tokens of the
                prompt attend to each token, over these tokens and the query heads of each KV head. None if `window` is
                0.
        """
        ...
