"""How much memory the scores of an index take: of as many query tokens at a time as a limit allows."""

from __future__ import annotations

from slotline.registry.contracts.attention import AttentionContext

MOST_BYTES = 256 << 20
"""Bytes of scores at a time. Prompts whose scores take more are scored and picked in pieces."""
ALIGNED = 64
"""Scores of a query token begin at a multiple of so many, so that one compiled kernel serves all lengths."""
PICK_TILE = 8192
"""Scores of a query token that a program holds in registers."""


def round_up(keys: int) -> int:
    """Return the scores that a query token has room for."""
    return -(-max(keys, 1) // ALIGNED) * ALIGNED


def listed(keys: int, most: int) -> int:
    """Return how many scores and slots are listed for a query token before the last `most` are picked among them.

    None are where a program holds all scores, or where it would list all.
    """
    return 0 if keys <= PICK_TILE or most > PICK_TILE else -(-keys // PICK_TILE) * most


def row_bytes(keys: int, most: int) -> int:
    """Return the bytes that a query token takes: scores, listed scores and listed slots of four bytes each."""
    return 4 * round_up(keys) + 8 * listed(keys, most)


def workspace(context: AttentionContext) -> int:
    """Return the bytes that scores take at most, 0 for layers without an index of their own."""
    most = max((layer.index_topk or 0 for layer in context.layers), default=0)
    if not most:
        return 0
    row = row_bytes(context.max_model_len, most)
    return max(row, min(MOST_BYTES, row * context.max_tokens))
