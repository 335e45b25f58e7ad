"""Expected contents of a cache, by brute force: the keys that later tokens read, and the resumable prefixes.

With a window of W tokens a query sees W keys, its own included. With a chunk of C tokens it sees the keys of its own
chunk up to its own. Otherwise it sees all keys up to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slotline.registry.contracts import AttentionLayer, BlockHash

Int = np.ndarray[Any, np.dtype[np.int64]]
Lookup = Callable[[BlockHash], int | None]


def oldest_visible(layers: Sequence[AttentionLayer], num_tokens: int) -> Int:
    """Return, for the query at each position, the oldest position that some layer reads: [num_tokens] int64."""
    query = np.arange(num_tokens)
    windows = [num_tokens if layer.window is None else layer.window for layer in layers]
    chunks = [num_tokens or 1 if layer.chunk is None else layer.chunk for layer in layers]
    in_window = np.maximum(0, query[None] - np.array(windows)[:, None] + 1)
    in_chunk = query[None] // np.array(chunks)[:, None] * np.array(chunks)[:, None]
    return np.maximum(in_window, in_chunk).min(axis=0)  # type: ignore[no-any-return]


def oldest_needed(layers: Sequence[AttentionLayer], max_model_len: int) -> Int:
    """Return the oldest position that tokens n, n + 1, ... read once n tokens are computed: [max_model_len + 1] int64.

    At the longest sequence no token follows, and the answer is `max_model_len`.
    """
    oldest = np.append(oldest_visible(layers, max_model_len), max_model_len)
    return np.minimum.accumulate(oldest[::-1])[::-1]


def freeable_blocks(layers: Sequence[AttentionLayer], max_model_len: int, block_size: int) -> Int:
    """Return the leading blocks that are not read any more once n tokens are computed: [max_model_len + 1] int64."""
    return oldest_needed(layers, max_model_len) // block_size


def resumable(hashes: Sequence[BlockHash], lookup: Lookup, length: int, freeable: Int, block_size: int) -> bool:
    """Return True if a request may continue after `length` cached blocks: each block that it will read exists."""
    return all(lookup(hashes[block]) is not None for block in range(int(freeable[length * block_size]), length))


def longest_prefix(hashes: Sequence[BlockHash], lookup: Lookup, freeable: Int, block_size: int) -> int:
    """Return the number of blocks in the longest resumable prefix, by trying all lengths.

    `freeable` is the result of `freeable_blocks`. A length at which no cached block would be read at all, like after a
    window of one token, is not counted.
    """
    lengths = [n for n in range(1, len(hashes) + 1) if freeable[n * block_size] < n]
    return max((n for n in lengths if resumable(hashes, lookup, n, freeable, block_size)), default=0)


def unbroken_prefix(hashes: Sequence[BlockHash], lookup: Lookup) -> int:
    """Return the number of cached blocks before the first missing one, for a cache that keeps every block."""
    missing = (index for index, block_hash in enumerate(hashes) if lookup(block_hash) is None)
    return next(missing, len(hashes))
