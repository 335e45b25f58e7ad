"""Projections of queries, keys and values in one, and the order of what lies in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from slotline.plugins.model_families.tensor_parallel.pieces import Cut, Groups, Section
from slotline.plugins.model_families.tensor_parallel.work import heads


@frozen
class Heads:
    """Heads of an attention module.

    Attributes:
        count: number of query heads.
        kv: number of heads with keys and values of their own.
        size: numbers of one head's key.
        value_size: numbers of one head's value.
    """

    count: int
    kv: int
    size: int
    value_size: int


def _behind(module: Any, count: int, size: int, width: int) -> tuple[Heads, Cut]:
    """All queries, all keys, all values."""
    kv = (width // size - count) // 2
    shared = Section(kv, size, repeats=True)
    return Heads(count, kv, size, size), Cut.of(Section(count, size), shared, shared)


def _by_head(module: Any, count: int, size: int, width: int) -> tuple[Heads, Cut]:
    """Query, key and value of one head after those of another."""
    return Heads(count, count, size, size), heads(count, 3 * size)


def _by_group(module: Any, count: int, size: int, width: int) -> tuple[Heads, Cut]:
    """KV heads one after the other, each as its queries, its key and its value."""
    kv = width // size - count >> 1
    shared = Section(1, size, repeats=True)
    return Heads(count, kv, size, size), Groups((Section(count // kv, size), shared, shared), kv)


def _falcon(module: Any, count: int, size: int, width: int) -> tuple[Heads, Cut]:
    if module.new_decoder_architecture:
        return _by_group(module, count, size, width)
    return (_behind if module.multi_query else _by_head)(module, count, size, width)


def _bigcode(module: Any, count: int, size: int, width: int) -> tuple[Heads, Cut]:
    return (_behind if module.multi_query else _by_head)(module, count, size, width)


def _codegen(module: Any, count: int, size: int, width: int) -> tuple[Heads, Cut]:
    """Blocks of the ranks that it was trained on, each with queries, values and keys."""
    return Heads(count, count, size, size), heads(module.mp_num, width // module.mp_num)


Layout = Callable[[Any, int, int, int], tuple[Heads, Cut]]
PACKED: Mapping[str, Mapping[str, Layout]] = {
    "qkv_proj": {"Phi3Attention": _behind, "Phi4MultimodalAttention": _behind, "CodeGenAttention": _codegen},
    "Wqkv": {"MptAttention": _behind, "DbrxAttention": _behind, "ModernBertAttention": _behind},
    "query_key_value": {
        "BloomAttention": _by_head,
        "FalconAttention": _falcon,
        "FuyuAttention": _by_head,
        "GPTNeoXAttention": _by_head,
        "PersimmonAttention": _by_head,
    },
    "c_attn": {
        "DecisionTransformerGPT2Attention": _behind,
        "GPT2Attention": _behind,
        "GPTBigCodeAttention": _bigcode,
    },
}
"""Name of a packed projection -> class -> order of what lies in it."""
