"""Padding rules: how many tokens a step runs with (behaviour 87), and which sizes graphs are captured for (21)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


def padded_size(num_tokens: int, graph_sizes: tuple[int, ...]) -> int:
    """The smallest captured size that holds `num_tokens`; the exact number beyond the largest or without graphs."""
    index = bisect_left(graph_sizes, num_tokens)
    return graph_sizes[index] if index < len(graph_sizes) else num_tokens


def graph_sizes(sizes: Iterable[int], *, uniform_query_len: int, max_requests: int) -> tuple[int, ...]:
    """Capture sizes in rising order for batches of equal query length: multiples of it, up to the largest batch."""
    largest = max_requests * uniform_query_len
    rounded = {-(-size // uniform_query_len) * uniform_query_len for size in sizes}
    return tuple(sorted(size for size in rounded if size <= largest))
