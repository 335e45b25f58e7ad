"""The KV connector contract, version 1: blocks of the cache that are kept elsewhere, and come back as prefix hits.

A connector is built once, when the caches are allocated; its context registers them, and brings the operation that
copies whole blocks between them and host memory. From then on:

* A request that joins takes its prefix from the pool's blocks as ever. For those that the pool does not have, the core
  asks `held`; what the connector holds gets new blocks, and counts as computed.
* `start` is called before a step's forward pass, in which loaded blocks are read and saved ones may be overwritten.
  Loads and saves run in the order of the device's current stream, or `wait` makes it wait for them.
* `wait` is called when the forward pass is about to start, after the host has prepared it.
* `failed` is called when the device is done with that step, before its results are used. Requests that hold a block
  whose load failed are computed again from the last good one, and ask no connector any more: nothing is lost, and the
  results that the block has spoiled are thrown away.

A connector that raises costs its hits, never a request. A block's hash tells its tokens, all before them, the salt and
the adapter apart, but not models: what outlives an engine or serves several must keep these apart itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from attrs import frozen

from slotline.registry.capability import Set
from slotline.registry.contracts.attention import AttentionLayer, KVCache
from slotline.registry.contracts.kv_spec import BlockHash
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True, field_transformer=declared)
class KVConnectorCapabilities:
    """What a connector offers.

    Attributes:
        devices: device types whose caches it can read and write.
        kv_kinds: cache kinds, as ``full``, whose blocks it holds; any where bytes are all that it looks at.
        saves: when blocks are handed to `KVConnector.start`: ``filled``, each once its last token is computed, or
            ``evicted``, when the pool is about to use it for something else.
    """

    devices: Set[str]
    kv_kinds: Set[str] = Set(None)
    saves: Literal["filled", "evicted"] = "filled"


class CacheBlock(NamedTuple):
    """A block of the pool with a known content.

    Attributes:
        group: index of its cache group in `KVConnectorContext.groups`.
        block_hash: of the prefix that ends with it.
        block: its number in the pool.
    """

    group: int
    block_hash: BlockHash
    block: int


@frozen(kw_only=True)
class ConnectorGroup:
    """A cache group, as a connector sees it.

    Attributes:
        name: of the group in the plan.
        layers: that own a cache, in the order in which a copied block holds their bytes.
        kv_dtype: name of the element type.
        layout: physical order inside a kernel block.
        block_size, kernel_block_size: tokens; the second divides the first.
        block_bytes: of a block over all layers.
    """

    name: str
    layers: tuple[AttentionLayer, ...]
    kv_dtype: str
    layout: str
    block_size: int
    kernel_block_size: int
    block_bytes: int


class BlockCopy(Protocol):
    """Copies whole blocks of a cache group between the caches and rows of host memory, in the stream's order.

    A row is [block_bytes] uint8. Only copies from and to pinned rows leave the host free to go on.
    """

    def to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Read `blocks` into `rows`, as many."""
        ...

    def to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Write `rows` into `blocks`, as many; the blocks are distinct."""
        ...


@frozen(kw_only=True)
class KVConnectorContext:
    """What a connector's factory gets.

    Attributes:
        groups: the cache groups, by their indices.
        caches: the cache of each layer that owns one, by the layer's index.
        num_blocks: of the pool, the null block included.
        copy: copies blocks.
        device: torch device string; of the first pipeline stage, where there are several.
        model: what tells the model's keys and values from those of others: its path and its dtype.
        options: the plugin's own table or None.
    """

    contract: int
    groups: tuple[ConnectorGroup, ...]
    caches: Mapping[int, KVCache]
    num_blocks: int
    copy: BlockCopy
    device: str
    model: str
    options: Any = None


class KVConnector(Protocol):
    """What a built connector can do."""

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        """Whether the block of each hash could be loaded now; asked while a step is scheduled, so it must be quick."""
        ...

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        """Begin to save and to load blocks.

        A block of the pool may be in both: it is read before it is written. What saving costs in room must not cost
        one of `loads`, which `held` said yes to. What is in `saves` may be held already.
        """
        ...

    def wait(self) -> None:
        """Return once a forward pass that is launched now reads what was loaded, and overwrites what was saved."""
        ...

    def failed(self) -> Collection[int]:
        """Blocks of the pool whose load failed since the last call; the steps that read them are done."""
        ...

    def reset(self) -> None:
        """Forget every block: the weights have changed."""
        ...
