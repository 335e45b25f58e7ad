"""The KV connector contract, version 1: cache blocks that are stored elsewhere and come back as prefix hits.

A connector is built once, when the caches are allocated. Its context registers the caches and provides the operation
that copies whole blocks between them and host memory. From then on:

* A request that joins takes its prefix from the pool's blocks as usual. For blocks that the pool does not have, the
  core calls `held`. Blocks that the connector holds get new blocks in the pool and count as computed.
* `start` is called before a step's forward pass, in which loaded blocks are read and saved blocks may be overwritten.
  Loads and saves run in the order of the device's current stream, or `wait` makes that stream wait for them.
* `wait` is called just before the forward pass, after the host has prepared it.
* `failed` is called when the device has finished that step, before its results are used. Requests that hold a block
  whose load failed are recomputed from the last good block, without asking a connector again. No request is lost, and
  results computed from the bad block are discarded.

The loads of an `asynchronous` connector take their own time. `start` begins them, also in steps without tokens. Their
request has its row and its blocks, and waits without tokens while others run. Before each step `arrived` and `failed`
say which loads have ended. The request runs once all of its loads have. If one has failed, the request is computed from
the last good block. Blocks stay reserved until their load has ended, even if the request was aborted meanwhile.

The saves of a connector with `lasting_saves` take their own time too. `start` begins them, and reads the blocks
afterwards. The blocks stay as they are until `saved` tells of them, also if their request has ended meanwhile. No more
than `kv_connector.max_saves` blocks are in this state at a time.

An exception in a connector costs its hits, never a request. A block's hash covers its tokens, all tokens before them,
the salt and the adapter, but not the model. A store that outlives an engine or serves several engines must separate
models itself.

Ranks of an engine have a connector each, for the blocks of their own heads and layers. All connectors are asked for the
same blocks in the same order. A block counts as held if all of them hold their part, and as failed if one of them says
that its part failed. A store that serves several ranks must separate their parts: `KVConnectorContext.identity` does.
Replicas have the same identities, so that one finds what another has saved.

Layers with states of fixed size (`slotline.registry.contracts.state`) are handed over too if the connector declares
`states`. Their group is the last one. A block of it is a copy of the states of all layers behind a prefix, named by the
hash of that prefix. It is passed to `start` once it is kept, whatever `saves` says. The numbers of such blocks go on
after those of the pool. Requests of such a model wait for their blocks without tokens also if the connector is not
asynchronous: `wait` follows `start` at once then, and a request runs once the device has what was loaded for it.

A connector's options may have a method `notes() -> Sequence[str]`: what a user should know of them, such as that blocks
are rounded. `slotline explain` shows it. Those of a connector that declares `layers` may have a method `by_layer()`. It
returns ``must`` if a plan without calls at layers is to be refused, as without this method. With ``may`` such a plan
goes without them, and says why. With ``never`` no plan has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from attrs import field, frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.attention import AttentionLayer, LayerCache
from slotline.registry.contracts.cache_tensors import PLAIN
from slotline.registry.contracts.kv_spec import BlockHash
from slotline.registry.contracts.state import StateLayer
from slotline.registry.declared import declared
from slotline.registry.errors import ContractError

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True, field_transformer=declared)
class KVConnectorCapabilities:
    """Capabilities that a connector declares.

    Attributes:
        devices: device types whose caches it can read and write.
        kv_kinds: cache kinds whose blocks it can hold, e.g. ``full``. Any kind if it only copies bytes.
        saves: the time at which blocks are passed to `KVConnector.start`: ``filled`` once a block's last token is
            computed, or ``evicted`` when the pool is about to reuse the block.
        asynchronous: whether loads end in later steps, see `AsyncKVConnector`.
        by_request: whether it finds blocks by what a request says of them, see `RequestKVConnector`.
        counts: whether it counts its events for metrics, see `CountingKVConnector`.
        folder: name of its option that holds a folder, if its blocks are files there that outlive the process. Wrong
            bytes in these files must be told from right ones. Empty for other connectors.
        room: name of its option that holds the size of its store, such as ``1GiB``. It keeps no more blocks than that.
            Empty for other connectors.
        spills: whether it calls `KVConnectorContext.evicted` with the blocks that it gives up to make room.
        composes: name of its option that names the connectors that it is made of. It gets them from
            `KVConnectorContext.inner`, and what they cannot do it cannot do. Empty for other connectors.
        judges: whether it leaves out those of its parts that take longer for a token than computing does, by
            `KVConnectorContext.computing`. The engine does not leave it out as a whole then.
        lasting_saves: whether saves end in later steps, see `LastingKVConnector`. It is `asynchronous` then, and does
            not take ``evicted`` blocks, which are about to be overwritten.
        states: whether it takes a group of states, whose blocks are much larger than others.
        own_rows: whether it keeps the rows that it passes to `BlockCopy.to_device`, and only `BlockCopy` writes them.
            Then `tiers` can have them copied beside forward passes.
        items: whether it hands over what encoders make of images and other items, see `ItemKVConnector`. It declares
            `by_request` and `asynchronous` then.
        layers: whether it is called at each layer of a forward pass, see `LayerKVConnector`. It is refused where
            attention is inside captured graphs.
        damage: a `DamageStore` of its own as ``package.module:function``, by which the conformance suite spoils what it
            keeps. It tells wrong bytes from right ones then. Empty for other connectors.
        peers: name of its option that lists the connectors which it may ask, as HOST:PORT, if it is `by_request`. An
            `answer` has its own address as ``remote_host`` and ``remote_port`` then. Empty for other connectors.
        late_layers: whether the calls of all layers may come behind a pass whose attention is inside a captured graph.
            It leaves no load to `wait_layer` then.
    """

    devices: Set[str]
    kv_kinds: Set[str] = Set(None)
    saves: Literal["filled", "evicted"] = "filled"
    asynchronous: Flag = Flag(False)
    by_request: Flag = Flag(False)
    counts: Flag = Flag(False)
    folder: str = ""
    room: str = ""
    spills: Flag = Flag(False)
    composes: str = ""
    states: Flag = Flag(False)
    own_rows: Flag = Flag(False)
    items: Flag = Flag(False)
    layers: Flag = Flag(False)
    late_layers: Flag = Flag(False)
    judges: Flag = Flag(False)
    damage: str = ""
    peers: str = ""
    lasting_saves: Flag = field(default=Flag(False))

    @lasting_saves.validator
    def _keeps_blocks(self, _attribute: object, value: Flag) -> None:
        if value.support and (self.saves == "evicted" or not self.asynchronous.support):
            raise ContractError(
                f"KVConnectorCapabilities.lasting_saves with saves={self.saves!r} and "
                f"asynchronous={self.asynchronous.support}: blocks must stay until their save has ended",
                fix='declare saves="filled" and asynchronous=Flag(True) too',
            )


class CacheBlock(NamedTuple):
    """Block of the pool with known content.

    Attributes:
        group: index of its cache group in `KVConnectorContext.groups`.
        block_hash: hash of the prefix that ends with it.
        block: its number in the pool.
    """

    group: int
    block_hash: BlockHash
    block: int


class EvictedBlock(NamedTuple):
    """Block that a connector gives up to make room.

    Attributes:
        group, block_hash: its name.
        row: its bytes in host memory, [block_bytes] uint8. They are overwritten after the call.
    """

    group: int
    block_hash: BlockHash
    row: torch.Tensor


@frozen(kw_only=True)
class ConnectorGroup:
    """Facts of a cache group for a connector.

    Attributes:
        name: name of the group in the plan.
        layers: the layers that own a cache, in the order of their bytes in a copied block.
        kv_dtype: name of the element type.
        format: format of the caches.
        layout: physical order inside a kernel block. Of a group of states, the cache specs that lay out their memory.
        block_size, kernel_block_size: tokens. The second divides the first.
        block_bytes: bytes of a block over all layers.
        states: the layers of a group of states, which has no `layers`. Its `kv_dtype` is ``uint8``.
        layer_bytes: bytes of a block of each of `layers`. Empty where a layer's part cannot be copied alone.
    """

    name: str
    layers: tuple[AttentionLayer, ...]
    kv_dtype: str
    layout: str
    block_size: int
    kernel_block_size: int
    block_bytes: int
    format: str = PLAIN
    states: tuple[StateLayer, ...] = ()
    layer_bytes: tuple[int, ...] = ()


class BlockCopy(Protocol):
    """Operation that copies whole blocks of a cache group between the caches and host memory, in stream order.

    A row of host memory is [block_bytes] uint8. Only copies from and to pinned rows return without waiting for the
    device. For caches in host memory `to_host` may be called by another thread than that of the steps, if blocks stay
    as they are meanwhile.
    """

    def to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Copy `blocks` into `rows`, which has the same length."""
        ...

    def to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Copy `rows` into `blocks`, which has the same length. The blocks are distinct."""
        ...


class BlockCopyBeside(BlockCopy, Protocol):
    """Further methods of the engine's copies, which need not be there where something else stands in for them.

    On a GPU they take place beside the forward passes. Nothing waits for them but who asks.
    """

    def begin_to_host(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Callable[[], bool]:
        """Do what `to_host` does. Return a function that says whether the rows have the bytes. Any thread may call it.

        Forward passes that are launched later may overwrite the blocks.
        """
        ...

    def begin_to_device(self, group: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Callable[[], bool]:
        """Do what `to_device` does. Return a function that says whether the blocks have the bytes.

        Before that nothing but these methods may write the rows, and no forward pass may be launched that reads the
        blocks. Passes that were launched earlier may still use them.
        """
        ...


class LayerBlockCopy(BlockCopy, Protocol):
    """Further method of copies between caches and host memory, where `ConnectorGroup.layer_bytes` is given."""

    def begin_layer_to_host(
        self, group: int, layer: int, blocks: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> Callable[[], bool]:
        """Copy the part of a layer of `blocks` into its place in `rows`, which are those of whole blocks.

        The layer is named by its position in `ConnectorGroup.layers`. Otherwise as `to_host`. Return a function that
        says whether the rows have the bytes. Any thread may call it.
        """
        ...


@frozen(kw_only=True)
class KVConnectorContext:
    """Input of a connector's factory.

    Attributes:
        groups: the cache groups, by their indices.
        caches: the cache of each layer that owns one, by the layer's index.
        num_blocks: number of blocks in the pool, the null block included.
        num_states: number of blocks of a group of states, which are numbered from `num_blocks` on.
        copy: copies blocks.
        device: torch device string, of the first pipeline stage if there are several.
        model: identifies the model's keys and values among those of other models: its path and its dtype, a digest of
            its files and of the settings that change keys, and the `part` if there is one.
        options: the plugin's own table or None.
        part: what this rank has of each block, such as ``tensor 0/2``. Empty for all of it.
        evicted: called by a connector that `spills` with blocks that it gives up to make room, not with those that it
            forgets in `reset`. None if nobody takes them.
        inner: builds the connector of a name, with its own table, from a context. Returns its capabilities and the
            connector. None for connectors that do not declare `composes`.
        computing: returns the seconds in which this engine computes a token of a prompt, 0 while they are not known.
            None if nothing is to be left out for being slower, or the connector does not declare `judges`.
    """

    contract: int
    groups: tuple[ConnectorGroup, ...]
    caches: Mapping[int, LayerCache]
    num_blocks: int
    copy: BlockCopy
    device: str
    model: str
    options: Any = None
    part: str = ""
    num_states: int = 0
    evicted: Callable[[Sequence[EvictedBlock]], None] | None = None
    inner: Callable[[str, KVConnectorContext], tuple[KVConnectorCapabilities, KVConnector]] | None = None
    computing: Callable[[], float] | None = None

    @property
    def identity(self) -> str:
        """Return a name for the bytes of these blocks, [64] hexadecimal digits.

        It is the same for engines whose blocks of equal hashes can take each other's place: those of the same model and
        part whose caches have the same form.
        """
        facts: list[Any] = [self.model, self.part]
        for group in self.groups:
            layers = [(layer.index, layer.num_kv_heads, layer.head_size, layer.head_size_v) for layer in group.layers]
            sizes = (group.block_size, group.kernel_block_size, group.block_bytes)
            other: list[Any] = [] if group.format == PLAIN else [group.format]
            other += [(layer.index, layer.state_kind, layer.tensors) for layer in group.states]
            facts.append((group.name, group.kv_dtype, group.layout, sizes, layers, *other))
        return hashlib.sha256(repr(facts).encode()).hexdigest()


class KVConnector(Protocol):
    """Protocol of a built connector."""

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        """Return, for each hash, True if its block could be loaded now.

        Called while a step is scheduled, so it must be fast.
        """
        ...

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        """Begin to save and to load blocks.

        A block of the pool may be in both: it is read before it is written. With `lasting_saves` none is in both.
        Making room for `saves` must not evict any of `loads`, which `held` has confirmed. `saves` may contain blocks
        that are already held.
        """
        ...

    def wait(self) -> None:
        """Ensure that a forward pass launched after this call reads the loaded data and may overwrite saved blocks."""
        ...

    def failed(self) -> Collection[int]:
        """Return the blocks of the pool whose load failed since the last call.

        The steps that read them have finished.
        """
        ...

    def reset(self) -> None:
        """Forget every block, because the weights have changed."""
        ...


class AsyncKVConnector(KVConnector, Protocol):
    """Further methods of a connector whose loads end in later steps.

    `wait` waits for saves alone.
    """

    def arrived(self) -> Collection[int]:
        """Return the blocks of the pool whose load has ended well since the last call.

        Forward passes that are launched from now on read the loaded data.
        """
        ...

    def finish(self) -> None:
        """Wait until no load is under way any more. `arrived` and `failed` tell of them afterwards."""
        ...


class LastingKVConnector(AsyncKVConnector, Protocol):
    """Further method of a connector whose saves end in later steps. Its `finish` waits for saves, too.

    If `start` raises, it reads none of the blocks that it was to save.
    """

    def saved(self) -> Collection[int]:
        """Return the blocks whose save has ended since the last call, well or not. They may be overwritten now."""
        ...


class RequestKVConnector(KVConnector, Protocol):
    """Further methods of a connector that is told by a request where its blocks are.

    The request has `kv_transfer_params` then, with the names that vLLM uses: ``do_remote_prefill`` for a prompt that
    another engine has computed, ``do_remote_decode`` for one that another engine is to continue, and what the answer of
    the first request said. The values may come from anyone, so they are to be checked.
    """

    def held_for(self, group: int, hashes: Sequence[BlockHash], params: Mapping[str, Any]) -> Sequence[bool]:
        """Return, for each hash, True if its block could be loaded for a request with these parameters.

        Called in place of `held`. A block that turns out to be missing is a failed load.
        """
        ...

    def answer(self, params: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the parameters of the request that another engine is to continue with, None for nothing.

        Any thread may call it. The values can be written as JSON.
        """
        ...


class ItemKVConnector(RequestKVConnector, Protocol):
    """Further methods of a connector that hands over encoder outputs of items besides text, by the hash of an item."""

    def item_encoded(self, mm_hash: str, output: torch.Tensor) -> None:
        """Keep an encoder's output for other engines, [n, width] on the device.

        The device's current stream writes it, and nobody changes it afterwards. Return soon.
        """
        ...

    def load_items(self, mm_hashes: Sequence[str], params: Mapping[str, Any]) -> None:
        """Begin to load encoder outputs for a request with these parameters. Each is told once by `items`."""
        ...

    def items(self) -> Mapping[str, torch.Tensor | None]:
        """Return the items whose load has ended since the last call, by hash.

        Each is [n, width] in host memory, None if it could not be loaded.
        """
        ...


class LayerKVConnector(KVConnector, Protocol):
    """Further methods of a connector that works layer by layer while a forward pass runs.

    They are called between `wait` and the end of a forward pass, once for each layer that owns a cache, in the order of
    the pass. vLLM calls them `wait_for_layer_load` and `save_kv_layer`. `wait` may leave loads to `wait_layer`.
    """

    def filling(self, blocks: Sequence[CacheBlock]) -> None:
        """Note the blocks that the next forward pass fills with known tokens. There may be none.

        Those that hold what they should are passed to `start` afterwards, as ever. Others are not, for instance since
        the step failed.
        """
        ...

    def wait_layer(self, layer: int) -> None:
        """Ensure that the attention of the layer of an index reads the loaded data. It comes next."""
        ...

    def save_layer(self, layer: int) -> None:
        """Note that the new keys and values of a layer are written, in the order of the device's current stream."""
        ...


class DamageStore(Protocol):
    """Function that spoils what a connector keeps, behind its back. No engine calls it."""

    def __call__(self, connector: KVConnector, how: str) -> bool:
        """Spoil all blocks that a built connector keeps. Return False if they cannot be spoiled so.

        Args:
            connector: which has saved some blocks.
            how: ``changed`` if each block is to have a wrong byte, ``swapped`` if blocks of a group are to have each
                other's place, with all that is kept beside their bytes, ``gone`` if they are to be removed.
        """
        ...


class CountingKVConnector(KVConnector, Protocol):
    """Further method of a connector that counts events for metrics."""

    def counts(self) -> Mapping[str, float]:
        """Return the number of each event so far, by its name. Called from any thread while steps run."""
        ...
