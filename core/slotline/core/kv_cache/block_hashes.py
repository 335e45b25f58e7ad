"""Chained hashes of a request's tokens, by which blocks of equal prefixes are found."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import gcd, lcm

import numpy as np
import numpy.typing as npt

from slotline.core.batch.request import Request
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.registry.contracts import BlockHash


def hash_sizes(groups: Sequence[CacheGroup], unit: int) -> tuple[int, int]:
    """Return the tokens of a hashed piece, and those of a unit: prefixes that all cache groups can share are units.

    Args:
        groups: the cache groups.
        unit: tokens of both without cache groups.
    """
    sizes = [group.block_size for group in groups]
    return (gcd(*sizes), lcm(*sizes)) if sizes else (unit, unit)


def extend_hashes(request: Request, token_ids: npt.NDArray[np.int32], count: int, size: int) -> list[BlockHash]:
    """Extend a request's chain of hashes to `count` pieces of `size` tokens and return it.

    Args:
        request: keeps its chain in `block_hashes`.
        token_ids: [n] int32, its tokens from the first on, at least those of the pieces.
        count: pieces wanted. The chain may be longer.
        size: tokens of a piece, always the same.
    """
    chain = request.block_hashes
    parent, first, extra = chain[-1] if chain else _root(request), len(chain) * size, request.hash_extra
    data, width = token_ids[first : max(first, count * size)].tobytes(), size * token_ids.itemsize
    for at in range(0, len(data), width):
        content = parent + data[at : at + width]
        if extra is not None:
            start = first + at // token_ids.itemsize
            content += extra(start, start + size)
        parent = hashlib.sha256(content).digest()
        chain.append(parent)
    return chain


def _root(request: Request) -> bytes:
    """Return the start of a request's chain of hashes. Prefixes are shared only with equal salts and equal keys."""
    root = hashlib.sha256(b"salt:" + request.cache_salt.encode()).digest()  # the salt was checked at admission
    return hashlib.sha256(root + request.cache_key.encode()).digest() if request.cache_key else root
