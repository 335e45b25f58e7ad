"""What a cache must keep, by brute force: which keys later tokens read, and which cached prefixes can be resumed.

A window of W tokens shows the query W keys, its own included; a chunk of C tokens shows it those of its own chunk up to
its own; without either a query sees all keys up to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slotline.registry.contracts import AttentionLayer, BlockHash

Int = np.ndarray[Any, np.dtype[np.int64]]
Lookup = Callable[[BlockHash], int | None]


def oldest_visible(layers: Sequence[AttentionLayer], num_tokens: int) -> Int:
    """[num_tokens] int64: for the query at each position, the oldest position that some layer reads."""
    query = np.arange(num_tokens)
    windows = [num_tokens if layer.window is None else layer.window for layer in layers]
    chunks = [num_tokens or 1 if layer.chunk is None else layer.chunk for layer in layers]
    in_window = np.maximum(0, query[None] - np.array(windows)[:, None] + 1)
    in_chunk = query[None] // np.array(chunks)[:, None] * np.array(chunks)[:, None]
    return np.maximum(in_window, in_chunk).min(axis=0)  # type: ignore[no-any-return]


def oldest_needed(layers: Sequence[AttentionLayer], max_model_len: int) -> Int:
    """[max_model_len + 1] int64: once n tokens are computed, the oldest position that a token n, n + 1, ... reads.

    At the longest sequence no token follows, and the answer is `max_model_len`.
    """
    oldest = np.append(oldest_visible(layers, max_model_len), max_model_len)
    return np.minimum.accumulate(oldest[::-1])[::-1]


def freeable_blocks(layers: Sequence[AttentionLayer], max_model_len: int, block_size: int) -> Int:
    """[max_model_len + 1] int64: leading blocks that nobody reads any more once n tokens are computed."""
    return oldest_needed(layers, max_model_len) // block_size


def resumable(hashes: Sequence[BlockHash], lookup: Lookup, length: int, freeable: Int, block_size: int) -> bool:
    """Whether a request may go on behind `length` cached blocks: each block that it will read is there."""
    return all(lookup(hashes[block]) is not None for block in range(int(freeable[length * block_size]), length))


def longest_prefix(hashes: Sequence[BlockHash], lookup: Lookup, freeable: Int, block_size: int) -> int:
    """Blocks in the longest prefix that can be resumed; all lengths are tried. `freeable` is of `freeable_blocks`.

    A length at which no cached block would be read at all, as behind a window of one token, is not counted.
    """
    lengths = [n for n in range(1, len(hashes) + 1) if freeable[n * block_size] < n]
    return max((n for n in lengths if resumable(hashes, lookup, n, freeable, block_size)), default=0)


def unbroken_prefix(hashes: Sequence[BlockHash], lookup: Lookup) -> int:
    """Cached blocks from the start up to the first that is missing: a prefix for a cache that keeps every block."""
    missing = (index for index, block_hash in enumerate(hashes) if lookup(block_hash) is None)
    return next(missing, len(hashes))
