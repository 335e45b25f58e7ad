"""Padding rules: how many tokens a step runs with (behaviour 87)."""

from __future__ import annotations

from bisect import bisect_left


def padded_size(num_tokens: int, graph_sizes: tuple[int, ...]) -> int:
    """Return the smallest captured size that holds `num_tokens`.

    It is the exact number beyond the largest size or without graphs.
    """
    index = bisect_left(graph_sizes, num_tokens)
    return graph_sizes[index] if index < len(graph_sizes) else num_tokens
