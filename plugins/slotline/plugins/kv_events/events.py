"""Batches of events as vLLM encodes them: arrays in which each event begins with its name.

The fields and their order are those of `vllm/distributed/kv_events.py`. A reader of an older form, with fewer fields,
reads them too.
"""

from __future__ import annotations

from typing import Any

import msgspec

GPU = "GPU"
"""The medium that forward passes read, as vLLM names it on every device."""

Hash = int | bytes


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base class of all events. Its first element is the name of the class."""


class BlockStored(KVCacheEvent):
    """Blocks that extend one prefix, one behind the other, became findable.

    Attributes:
        block_hashes: of the prefixes that they end.
        parent_block_hash: of the prefix before them, None at the beginning.
        token_ids: of all of them.
        block_size: tokens of each.
        lora_id, lora_name: of the adapter, None without one.
        medium: where they are.
        extra_keys: always None.
        group_idx: index of the cache group, None where there is one only.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks can be found no more."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """No block can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What happened in a step.

    Attributes:
        ts: seconds since the epoch.
        data_parallel_rank: number of the replica.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
