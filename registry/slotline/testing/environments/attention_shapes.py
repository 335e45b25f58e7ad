"""Batches of the attention checks, as functions of the block size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

Requests = tuple[tuple[int, int], ...]
"""(query tokens, sequence length) of each request."""


def decode(p: int) -> Requests:
    """Return requests with one query token."""
    return ((1, 2 * p + 1), (1, 1), (1, p), (1, p + 1), (1, 5 * p + 3))


def prefill(p: int) -> Requests:
    """Return whole prompts."""
    return ((2 * p + 8, 2 * p + 8), (p + 1, p + 1), (3, 3))


def chunk(p: int) -> Requests:
    """Return prompts that continue after a prefix."""
    return ((p + 14, 4 * p + 20), (2 * p + 1, 3 * p + 1), (p, 2 * p), (1, 4 * p + 1))


def mixed(p: int) -> Requests:
    """Return decodes first, then verification, whole prompts and chunks."""
    return ((1, 2 * p + 1), (1, 5 * p + 10), (5, 2 * p + 8), (3 * p + 2, 3 * p + 2), (p + 4, 3 * p + 13))


def verify(p: int) -> Requests:
    """Return requests with draft tokens to verify."""
    return ((5, 2 * p + 5), (5, 5), (5, 6 * p + 5), (3, 4 * p))


SHAPES: Mapping[str, Callable[[int], Requests]] = MappingProxyType(
    {"decode": decode, "prefill": prefill, "chunk": chunk, "mixed": mixed, "verify": verify}
)


def with_empty_rows(requests: Requests) -> Requests:
    """Return the batch with idle requests in between: without query tokens, and without any token."""
    middle = (len(requests) + 1) // 2
    return (*requests[:1], (0, 9), *requests[1:middle], (0, 0), *requests[middle:], (0, 21))
