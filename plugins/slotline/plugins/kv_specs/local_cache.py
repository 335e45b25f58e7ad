"""Caches of layers that read a bounded stretch of the past: a sliding window, or the query's own chunk.

A block that no later token reads goes back to the pool. A request can continue from a cached prefix if the blocks that
the next token reads exist. Earlier blocks may be gone, and the table has the null block for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import gcd

from slotline.plugins.kv_specs.paged import PagedSpec
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.kv_spec import BlockHash, KVSpecContext
from slotline.registry.errors import PluginError

NULL_BLOCK = 0


class LocalSpec(PagedSpec, ABC):
    """Blocks of a layer with a bounded view of the past. Implements `KVSpec`."""

    @abstractmethod
    def oldest_read(self, num_computed_tokens: int) -> int:
        """Return the oldest position that the token after `num_computed_tokens` reads. It never falls as they grow."""

    @abstractmethod
    def peaks(self, last: int) -> Iterable[int]:
        """Return computed lengths up to `last` which include one with the most blocks held."""

    def max_blocks_held(self) -> int:
        context = self._context
        length, ahead = context.max_model_len, context.max_tokens_in_flight
        return max(
            self.blocks_needed(min(n + ahead, length)) - self.blocks_freeable(n)
            for n in self.peaks(max(0, length - ahead))
        )

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return max(0, self.oldest_read(num_computed_tokens)) // self._context.block_size

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Callable[[BlockHash], int | None]) -> list[int]:
        """Search from the end, so that each block is looked up at most once.

        If block i is missing, all lengths above i up to the current one read it, because a longer prefix never reads
        older blocks. The next length to try is therefore i. The last block must be cached even if nothing reads it (at
        the end of a chunk), because a prefix that was never computed is not a hit.
        """
        end, found = len(hashes), dict[int, int]()
        index = end - 1
        while end > 0 and index >= min(self._first_read(end), end - 1):
            block = lookup(hashes[index])
            if block is None:
                end = index
            else:
                found[index] = block
            index -= 1
        first = self._first_read(end)
        return [NULL_BLOCK] * first + [found[i] for i in range(first, end)]

    def _first_read(self, num_blocks: int) -> int:
        """Return the first block that is read after a prefix of `num_blocks` blocks."""
        return self.blocks_freeable(num_blocks * self._context.block_size)


class SlidingSpec(LocalSpec):
    """The widest window of the group's layers decides.

    Raises PluginError for a layer without a window, or with one below 1.
    """

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        self._window = max((_positive(layer, layer.window, "window") for layer in context.layers), default=1)

    def oldest_read(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - self._window + 1

    def peaks(self, last: int) -> Iterable[int]:
        """Return the lengths of one block. With a full window the held blocks depend only on the offset in a block."""
        return range(max(0, last - self._context.block_size + 1), last + 1)


class ChunkedLocalSpec(LocalSpec):
    """All layers of the group have one chunk.

    Raises PluginError for a layer without a chunk, with one below 1, or for unequal chunks.
    """

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)
        chunks = {_positive(layer, layer.chunk, "chunk") for layer in context.layers} or {1}
        if len(chunks) > 1:
            raise PluginError(f"chunks of {sorted(chunks)} tokens in one cache group", fix="make a group of each")
        (self._chunk,) = chunks

    def oldest_read(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self._chunk * self._chunk

    def peaks(self, last: int) -> Iterable[int]:
        """Return the ends of chunks, where most blocks are held, until the chunks' offsets in a block repeat."""
        different = self._context.block_size // gcd(self._chunk, self._context.block_size)
        ends = range((last + 1) // self._chunk, 0, -1)[:different]  # in chunks
        return [last, *(end * self._chunk - 1 for end in ends)]


def _positive(layer: AttentionLayer, value: int | None, what: str) -> int:
    if value is None or value < 1:
        raise PluginError(
            f"layer {layer.name!r} (kind {layer.kv_kind!r}) has {what} {value}",
            fix=f"a {what} counts the query itself, so it is 1 or more; give layers without one to another kv_spec",
        )
    return value
