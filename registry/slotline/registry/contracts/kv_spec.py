"""The KV-cache contract, version 1: what a kind of cache needs from the block pool.

A spec is built once for a cache group (layers that share one block table). The core owns the pool, the tables and the
reference counts; the spec answers questions about them. All counts are per request unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from slotline.registry.capability import Align, Flag, Set
from slotline.registry.contracts.attention import AttentionLayer, KVCache
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import torch

BlockHash = bytes
"""The chained hash of a full block: of its tokens, all before it, and what else tells two prefixes apart."""


@frozen(kw_only=True, field_transformer=declared)
class KVSpecCapabilities:
    """What a cache kind offers.

    Attributes:
        kv_kinds: the layers' kinds that it can hold, e.g. ``full``, ``sliding``.
        exact_kinds: those of them that it holds without waste; for the others `auto` uses it only if no plugin
            is exact, and the plan says so.
        block_sizes: manager block sizes it accepts.
        splittable: whether a manager block may be seen as several kernel blocks.
        prefix_caching: whether blocks can be shared between requests.
        page_stride: whether `bind` takes kernel blocks that lie apart, so that groups with other pages can share the
            pool's memory. Without it each block takes memory in every group, and the plan says how much that wastes.
        priority: `auto` prefers the higher figure.
    """

    kv_kinds: Set[str]
    exact_kinds: Set[str]
    block_sizes: Align = Align()
    splittable: Flag = Flag(True)
    prefix_caching: Flag = Flag(True)
    page_stride: Flag = Flag(False)
    priority: int = 0


@frozen(kw_only=True)
class KVSpecContext:
    """What a spec's factory gets.

    Attributes:
        contract: the bound contract version.
        layers: the layers of the cache group that own a cache.
        block_size, kernel_block_size: tokens; the second divides the first.
        layout: physical order inside a kernel block.
        kv_dtype: name of the element type.
        max_model_len: longest sequence.
        max_tokens_in_flight: most tokens by which a request's table runs ahead of its computed tokens: those of one
            step, or of two where a step is prepared while the one before runs.
        options: the plugin's own table or None.
    """

    contract: int
    layers: tuple[AttentionLayer, ...]
    block_size: int
    kernel_block_size: int
    layout: str
    kv_dtype: str
    max_model_len: int
    max_tokens_in_flight: int = 1
    options: Any = None


class KVSpec(Protocol):
    """What a built cache spec can do."""

    def page_bytes(self, layer: AttentionLayer) -> int:
        """Bytes that one manager block takes in one layer."""
        ...

    def blocks_needed(self, num_tokens: int) -> int:
        """Manager blocks in the table of a request of `num_tokens` tokens, freed leading ones included."""
        ...

    def max_blocks_held(self) -> int:
        """Most manager blocks that one request can hold at a time: over all computed lengths n, those needed for
        n + `max_tokens_in_flight` tokens (at most `max_model_len`) less those that may be freed at n."""
        ...

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        """Leading blocks that no later token will read, once `num_computed_tokens` are computed."""
        ...

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Callable[[BlockHash], int | None]) -> list[int]:
        """The longest cached prefix: block ids for tokens 0 .. len * block_size, null blocks (0) where unread."""
        ...

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> KVCache:
        """View `raw` as the layer's cache.

        `raw` is uint8, either [num_blocks * page_bytes(layer)], or, where `page_stride` is declared, a row for each
        kernel block, [num_blocks * ratio, page_bytes(layer) / ratio] with rows apart (`ratio` kernel blocks make one
        manager block).
        """
        ...
