"""The KV-cache contract, version 1: the needs of a kind of cache towards the block pool or the state slots.

A spec is built once for a cache group (layers that share one block table). The core owns the pool, the tables and the
reference counts. The spec answers questions about them. All counts are per request unless stated otherwise.

**Specs of states.** Layers with a state of fixed size (Mamba, linear attention, short convolutions) have slots instead
of blocks. Their spec declares ``state``. Its factory gets a `StateSpecContext` and returns a `StateSpec`, once for all
layers of the model that it holds. The core owns the slots and copies whole slots. The spec lays out their memory. It
also decides at which tokens checkpoints are taken, from which checkpoint a request continues, and which states are
rolled back after drafts were rejected. A checkpoint is a copy of a request's state after a prefix of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from slotline.registry.capability import Align, Flag, Set
from slotline.registry.contracts.attention import AttentionLayer, LayerCache
from slotline.registry.contracts.cache_tensors import PLAIN, CacheTensor
from slotline.registry.contracts.state import StateLayer
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Int = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

BlockHash = bytes
"""The chained hash of a full block: of its tokens, all before it, and what else tells two prefixes apart."""

UNDIVIDED = (1 << 63) - 1
"""Number of tokens that stands for no place: a request's tokens may not be divided over steps."""


@frozen(kw_only=True, field_transformer=declared)
class KVSpecCapabilities:
    """Capabilities that a cache spec declares.

    Attributes:
        kv_kinds: the kinds of layers that it can hold, e.g. ``full``, ``sliding``.
        exact_kinds: the kinds that it holds without waste. For other kinds `auto` uses it only if no plugin is exact,
            and the plan says so.
        block_sizes: manager block sizes that it accepts.
        splittable: a manager block may be split into several kernel blocks.
        prefix_caching: blocks can be shared between requests.
        page_stride: `bind` accepts kernel blocks with gaps between them, so that groups with other page sizes can share
            the pool's memory. Without it each block takes memory in every group, and the plan reports the waste.
        formats: formats of caches that it lays out (see `slotline.registry.contracts.cache_tensors`). A spec with
            another format than ``plain`` is a `TensorSpec`.
        priority: `auto` prefers the higher number.
        state: it holds states in slots instead of keys and values in blocks (see the module). `kv_kinds` and
            `exact_kinds` then name kinds of state layers, `prefix_caching` means that it takes checkpoints, and the
            capabilities about blocks do not apply.
    """

    kv_kinds: Set[str]
    exact_kinds: Set[str]
    block_sizes: Align = Align()
    splittable: Flag = Flag(True)
    prefix_caching: Flag = Flag(True)
    page_stride: Flag = Flag(False)
    formats: Set[str] = Set((PLAIN,))
    priority: int = 0
    state: Flag = Flag(False)


@frozen(kw_only=True)
class KVSpecContext:
    """Input of a spec's factory.

    Attributes:
        contract: the bound contract version.
        layers: the layers of the cache group that own a cache.
        block_size, kernel_block_size: tokens. The second divides the first.
        layout: physical order inside a kernel block.
        kv_dtype: name of the element type.
        format: format of the caches.
        max_model_len: longest sequence.
        max_tokens_in_flight: most tokens by which a request's table runs ahead of its computed tokens: those of one
            step, or of two if a step is prepared while the previous one runs.
        options: the plugin's own table or None.
    """

    contract: int
    layers: tuple[AttentionLayer, ...]
    block_size: int
    kernel_block_size: int
    layout: str
    kv_dtype: str
    max_model_len: int
    max_tokens_in_flight: int = 1
    format: str = PLAIN
    options: Any = None


class KVSpec(Protocol):
    """Protocol of a built cache spec."""

    def page_bytes(self, layer: AttentionLayer) -> int:
        """Return the bytes that one manager block takes in one layer."""
        ...

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the number of manager blocks in the table of a request of `num_tokens` tokens.

        Leading blocks that were freed are included.
        """
        ...

    def max_blocks_held(self) -> int:
        """Return the largest number of manager blocks that one request can hold at a time.

        This is the maximum over all computed lengths n of the blocks needed for n + `max_tokens_in_flight` tokens (at
        most `max_model_len`) minus the blocks that may be freed at n.
        """
        ...

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        """Return the number of leading blocks that no later token reads once `num_computed_tokens` are computed."""
        ...

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Callable[[BlockHash], int | None]) -> list[int]:
        """Return the longest cached prefix.

        Returns:
            Block ids for tokens 0 .. len * block_size, null blocks (0) where a block is never read.
        """
        ...

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> LayerCache:
        """View `raw` as the layer's cache: a `KVCache`, or `CacheTensors` in another format than ``plain``.

        `raw` is uint8, either [num_blocks * page_bytes(layer)], or, if `page_stride` is declared, one row for each
        kernel block, [num_blocks * ratio, page_bytes(layer) / ratio], with gaps between rows (`ratio` kernel blocks
        make one manager block).
        """
        ...


class TensorSpec(KVSpec, Protocol):
    """Protocol of a built cache spec that declares a format other than ``plain``.

    `slotline.registry.cache_pages` computes the bytes and the views of declared tensors.
    """

    def tensors(self, layer: AttentionLayer) -> Sequence[CacheTensor]:
        """Return the tensors of the layer's cache in the context's format.

        `bind` returns `CacheTensors` of these names. Not asked in the format ``plain``.
        """
        ...


@frozen(kw_only=True)
class StateSpecContext:
    """Input of the factory of a spec of states.

    Attributes:
        contract: the bound contract version.
        layers: the state layers that it holds. Their tensors have resolved dtypes.
        prefix_unit: tokens. Prefixes that requests share are multiples of it.
        max_model_len: longest sequence.
        options: the plugin's own table or None.
    """

    contract: int
    layers: tuple[StateLayer, ...]
    prefix_unit: int
    max_model_len: int
    options: Any = None


class StateSpec(Protocol):
    """Built cache spec of layers that keep a state of fixed size.

    The arrays of `stops`, `keeps` and `rolls_back` have one entry for each request, int64 unless stated otherwise, and
    must not be written to. `last` is the number of tokens in whole units that a request came with, `branch` the number
    of tokens that it shares with earlier requests, in whole units. Both are `UNDIVIDED` for a request whose tokens may
    not be divided over steps.
    """

    @property
    def interval(self) -> int:
        """Tokens between the checkpoints of a long prompt or text, a multiple of `prefix_unit`."""
        ...

    @property
    def alignment(self) -> int:
        """Alignment in bytes of each tensor in a slot."""
        ...

    def page_bytes(self, layer: StateLayer) -> int:
        """Return the bytes that one slot takes in one layer, padding included."""
        ...

    def bind(self, raw: torch.Tensor, layer: StateLayer, num_slots: int) -> Mapping[str, torch.Tensor]:
        """View a layer's memory as its tensors.

        Args:
            raw: [num_slots, page_bytes(layer)] uint8.
            layer: one of the context's layers.
            num_slots: slots of rows and of checkpoints.

        Returns:
            By name [num_slots, *shape] in the tensor's dtype, without overlap.
        """
        ...

    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        """Return each request's number of tokens after a step, so that a checkpoint can be taken there.

        Args:
            computed: tokens that are computed.
            ends: tokens that would be computed after the step, more than `computed`.
            last, branch: see the class.

        Returns:
            A number of tokens above `computed` and up to `ends`. `ends` leaves a request's tokens undivided.
        """
        ...

    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        """Return, as [n] bool, the requests whose states are kept between two steps, at `computed` tokens."""
        ...

    def prefix_hit(self, hashes: Sequence[BlockHash], is_kept: Callable[[BlockHash], bool]) -> int:
        """Return the longest prefix that a request can continue from, in units.

        Args:
            hashes: of prefixes of 1, 2, 3, ... units.
            is_kept: returns True if the state after a prefix is kept.

        Returns:
            A number n up to ``len(hashes)`` with ``is_kept(hashes[n - 1])``, or 0.
        """
        ...

    def rolls_back(self, counts: Int, accepted: Int) -> Mask:
        """Return, as [n] bool, the requests whose states must be rolled back after a step.

        Args:
            counts: tokens that the step computed.
            accepted: how many of them, from the first, were accepted.
        """
        ...
