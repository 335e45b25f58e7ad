"""The attention contract, version 1.

A backend is built once for an attention group (layers whose attention needs are equal); where a model is divided over
pipeline stages, once for each stage that has layers of the group. In each step the core calls
`plan` once for the group, on the host, then for each layer `write` (unless the backend writes inside `forward`) and
`forward`.

What the payload means:

* A window of W tokens lets a query see W keys, its own included: query position i sees keys max(0, i - W + 1) .. i.
* A chunk of C tokens lets a query see its own chunk: query position i sees keys i // C * C .. i.
* `slot_mapping` names each new token's slot, `kernel_block * kernel_block_size + offset`; slot -1 is never written.
* Kernel block 0 is the null block: block tables point to it where a request has no block; it is never read.
* Entries of a block table past a request's last block, and slots past its length, hold garbage (NaN in tests).
* `seq_lens` includes the new tokens; the queries of a request are its last tokens (bottom-right causal alignment).
* Of a layer with multi-head latent attention (`AttentionLayer.mla`), the key is what all heads share: the latent, then
  the part with positions; its first `head_size_v` numbers are the value too. The model multiplies the projections from
  the latent into queries and outputs ("absorbed", DeepSeek-V2, arXiv 2405.04434, section 2.1.2), so attention has one
  KV head. The cache holds keys alone, and `KVCache.value` is a view of them: `write` stores the key, `value` is not
  stored. In an eight-bit cache the key's scale counts, and the value's has no meaning.
* Layers of type ``encoder_only`` keep nothing: a request's keys are its tokens of this step and all see all of them
  (`causal` is False). Their batch has a block table without columns and slots -1, and their cache no blocks; `write` is
  called and must store nothing.
* Layers of type ``cross`` read all keys that an encoder gave for a request (`causal` is False): `seq_lens` count these,
  and `max_model_len` bounds them. They are stored in the step that computes the request's first token: `slot_mapping`
  has an entry for each that the step stores, request after request, so none in most steps and more than query tokens in
  some; `write` gets as many keys and values.
* ALiBi (`AttentionLayer.alibi_slopes`; Press et al. 2021, arXiv 2108.12409): behind the soft cap, a query at position
  i adds ``slope * (j - i)`` to its score with the key at position j, each query head by its own slope. The LSE counts
  such scores; nodes of a tree count their place in a text. It is defined for causal attention of type ``decoder``.
* A request may have zero query tokens. Rows `num_tokens..` of padded tensors are padding: any finite output will do.
* An LSE, where returned, is in the base that the descriptor declares, and counts a sink as one more key.
* A padded request (see below) may have query tokens and a length of 0, captured or not: any finite output will do.
* Where `lse` is declared, the cache may hold a part of the keys alone (context shards): a request of one query token
  then has a length that counts these, and a slot of -1 where its own key is in another part. It sees what the cache
  holds.

Where `graphs` is declared, `write` and `forward` may be captured once for a shape of batch and replayed:

* `plan` is called outside the graph, at the capture and before each replay, with a batch of the captured shape. The
  batch's tensors lie at the addresses of the capture; host copies and plans are new objects.
* A captured kernel reads what changes from those tensors, or from the backend's own buffers that `plan` fills again
  without waiting for the device. What the host decides (splits, grids) must serve every batch of the shape.
* The capture's batch is made up: the longest sequences, null blocks, slots -1. A smaller batch is padded: with requests
  of equally many query tokens, no tokens in all (a length of 0) and slots -1 where query lengths are equal, else with
  requests without query tokens. Padded rows may hold anything finite.

An eight-bit cache (a cache dtype of one byte) holds ``x / scale``, computed in float32, clamped to the dtype's finite
range and rounded to nearest even; what is read counts ``scale`` times. The scales of a layer are 1 unless the context's
`kv_scales` says otherwise; where they are not 1, a backend is needed that declares `kv_scales`.

Where `tree_mask` is declared, a batch may have a `tree`: the last query tokens of some requests are drafts in the form
of a tree. They take slots one behind the other like other tokens, but a node sees of the nodes only those on its own
path, and `positions` gives it the place that it would have in a text. Windows and chunks count in these positions. What
stands before the nodes is seen as ever. Such a batch is never captured.

Where `cascade` is declared:

* A batch whose requests all begin with the same kernel blocks may have a `common_prefix_len` above 0: a multiple of the
  kernel block size, no more than any request had in the cache before this step. The keys of these positions can be read
  once for all queries, without a mask, and joined with the rest by LSE. What comes out is the same as without.
* It is set only where `use_cascade` of every group concerned says yes, for layers without window or chunk.
* Where graphs are declared too, a batch with a common prefix is another shape than one without. It is captured with the
  longest prefix; replays have any other above 0, which a captured kernel reads from `common_prefix`. A backend whose
  cascade cannot be captured says ``Limit(when="cascade", capability="graphs", offer=Level(GraphSupport.NEVER))``.
* A padded request has a length of 0, below the common prefix, and null blocks throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from attrs import define, field, frozen

from slotline.registry.capability import Align, Choice, Flag, GraphSupport, Level, Limit, Max, Range, Set, Support
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


@frozen(kw_only=True, field_transformer=declared)
class AttentionCapabilities:
    """What an attention backend offers.

    Attributes:
        devices: device types it runs on.
        min_compute_capability: lowest CUDA (major, minor), None where it does not matter.
        dtypes: pairs (dtype, cache dtype) that work together, e.g. ``("bfloat16", "float8_e4m3fn")``.
        head_sizes: sizes of a query and key head.
        different_value_head: whether a value head may have another size.
        group_sizes: query heads per KV head.
        kernel_block_sizes: tokens in one block as the kernel sees it.
        preferred_block_sizes: those of them that the kernels are fastest with; `Align()` where it does not matter. A
            limit says for which layers it does: ``Limit(when="mla", capability="preferred_block_sizes", ...)``. Where
            ``cache.block_size`` is ``auto`` the nearest such size is taken, if all groups can have it. It never decides
            which backend is chosen.
        layouts: physical orders of a page, preferred first: ``NHD`` (token, head, dim) or ``HND`` (head, token, dim).
        attention_types: of ``decoder``, ``encoder_only``, ``cross``.
        query_len: most query tokens of one request in a batch.
        sliding_window, chunked, soft_cap, sinks, alibi, tree_mask: features by name; `chunked` is attention within
            chunks (`AttentionLayer.chunk`), `alibi` a bias by distance (`AttentionLayer.alibi_slopes`).
        mla: whether it serves multi-head latent attention, and `latent_sizes` with which sizes of a key (latent and
            position part together); `head_sizes` and `different_value_head` are not asked for then.
        cascade: whether a prefix that all requests share can be served apart; then there is a `use_cascade`.
        kv_scales: whether eight-bit caches are kept with the layer's scales.
        graphs: which batches `forward` can be captured for.
        plan_once: whether what `plan` gave at a capture serves every replay: it fills no buffers of the backend's own.
            Then nothing needs to be planned before a replay, and one graph can hold several steps.
        lse: whether `forward` can return the log-sum-exp, and `lse_base` in which base (``e`` or ``2``).
        writes_cache: True if `forward` stores the new keys and values itself; then `write` is not called.
        plain_writes: True if `write` stores keys and values of the cache's own dtype as they are, and does nothing
            else; then whoever makes them may store them, and `write` is not called.
        several_plans: True if a plan stays good after `plan` was called for another batch, so that a step can have one
            for all its query tokens and one for some of them.
        bounded_lengths: True if the host's lengths (`AttentionBatch.seq_lens_cpu` and `max_seq_len`) may be upper
            bounds, while `seq_lens` on the device is exact: the host prepares a step before it knows which drafts of
            the one before stood. Nothing may be read, written or masked by the host's numbers then.
        lowest_score: the lowest product of a query and a key, before `scale`, that is told from a masked one; None
            where there is no such figure, as with minus infinity for what is masked.
        batch_invariant: where the context asks for it, a token's output is bitwise the same whatever else is in the
            batch and however its request is cut into steps.
        limits: offers that shrink when another feature is needed.
        priority: `auto` prefers the higher figure on this device; give the reason in `priority_reason`.
    """

    devices: Set[str]
    dtypes: Set[tuple[str, str]]
    head_sizes: Range = Range()
    different_value_head: Flag = Flag(False)
    group_sizes: Range = Range()
    kernel_block_sizes: Align = Align()
    preferred_block_sizes: Align = Align()
    layouts: Choice = Choice(("NHD",))
    attention_types: Set[str] = Set(("decoder",))
    query_len: Max = Max()
    sliding_window: Flag = Flag(False)
    chunked: Flag = Flag(Support.NOT_IMPLEMENTED)
    soft_cap: Flag = Flag(False)
    sinks: Flag = Flag(False)
    alibi: Flag = Flag(Support.NOT_IMPLEMENTED)
    tree_mask: Flag = Flag(Support.NOT_IMPLEMENTED)
    mla: Flag = Flag(Support.NOT_IMPLEMENTED)
    latent_sizes: Range = Range()
    cascade: Flag = Flag(Support.NOT_IMPLEMENTED)
    kv_scales: Flag = Flag(Support.NOT_IMPLEMENTED)
    graphs: Level[GraphSupport] = Level(GraphSupport.NEVER)
    plan_once: Flag = Flag(False)
    lse: Flag = Flag(False)
    lse_base: str = "e"
    writes_cache: bool = False
    plain_writes: bool = False
    several_plans: bool = False
    bounded_lengths: bool = False
    lowest_score: float | None = None
    batch_invariant: Flag = Flag(False)
    min_compute_capability: tuple[int, int] | None = None
    limits: tuple[Limit, ...] = ()
    priority: int = 0
    priority_reason: str = ""


@frozen(kw_only=True)
class AttentionLayer:
    """The static facts of one attention layer.

    Attributes:
        name: the module's path in the model.
        index: position among the model's attention layers, from 0.
        num_heads, num_kv_heads, head_size, head_size_v: the shape.
        scale: factor on the scores before the soft cap.
        window: tokens a query may see, itself included; None for all.
        chunk: tokens of a chunk where attention stays within chunks: query i sees keys i // chunk * chunk .. i; None
            where it does not. A layer has a window or a chunk, not both.
        soft_cap: scores become ``cap * tanh(score / cap)``; None for none.
        sinks: whether the layer has a learned sink logit per query head.
        alibi_slopes: of each query head, what a score loses for each token between query and key; None for no such
            bias. The layers of a group have the same.
        mla: whether keys are latents that hold their own values: one KV head, the value of a key is its first
            `head_size_v` numbers.
        kv_kind: what kind of cache it needs, e.g. ``full`` or ``sliding``.
        attention_type: ``decoder``, ``encoder_only`` or ``cross``.
        shares_kv_with: index of the layer whose cache it reads, None for its own.
    """

    name: str
    index: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi_slopes: tuple[float, ...] | None = None
    mla: bool = False
    kv_kind: str = "full"
    attention_type: str = "decoder"
    shares_kv_with: int | None = None


class KVCache(NamedTuple):
    """The cache of one layer: two views, whatever the physical layout.

    Both have shape [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size]; strides follow the layout, the
    last dimension is contiguous. Kernel block 0 is the null block. With `AttentionLayer.mla` the value is the key's
    first `head_size_v` numbers, in the same memory.
    """

    key: torch.Tensor
    value: torch.Tensor


class KVScales(NamedTuple):
    """The scales of one layer's eight-bit cache: [] float32 each, on the device.

    Their addresses never change, their values may until the first request's first token is stored (where they are
    calculated from it), so kernels read them there and nobody keeps a copy on the host.
    """

    key: torch.Tensor
    value: torch.Tensor


class CacheSlots(NamedTuple):
    """Where the new keys and values of one layer's step belong.

    Attributes:
        cache: the layer's.
        slot_mapping: [num_tokens] int64, `kernel_block * kernel_block_size + offset`; -1 for a token that has none.
    """

    cache: KVCache
    slot_mapping: torch.Tensor


@frozen(kw_only=True)
class AttentionContext:
    """What a backend's factory gets: exactly what was negotiated, and its own options.

    Attributes:
        contract: the bound contract version.
        layers: the layers of the group; over pipeline stages those of one stage.
        device: torch device string; a CUDA device is the current one in every call.
        dtype, kv_dtype: names such as ``bfloat16``.
        block_size, kernel_block_size: tokens of a manager block and of a kernel block.
        layout: ``NHD`` or ``HND``.
        max_query_len, max_requests, max_tokens, max_model_len: bounds on every batch.
        kv_scales: by layer index, the scales of an eight-bit cache; a layer that is not in it has scales of 1.
        batch_invariant: whether the plan counts on the capability of that name.
        options: the plugin's own table, an instance of its options class, or None.
    """

    contract: int
    layers: tuple[AttentionLayer, ...]
    device: str
    dtype: str
    kv_dtype: str
    block_size: int
    kernel_block_size: int
    layout: str
    max_query_len: int
    max_requests: int
    max_tokens: int
    max_model_len: int
    kv_scales: Mapping[int, KVScales] = field(factory=dict)
    batch_invariant: bool = False
    options: Any = None


class TreeMask(NamedTuple):
    """Drafts in the form of a tree.

    Attributes:
        sees: [k, k] bool on the device, whether node i has node j on its path; itself included, never one behind it.
        depths: [k] int64 on the device, the nodes' places behind the known tokens, from 0.
        num_nodes: [num_requests] int32 on the host, how many of the first nodes each request's last query tokens are.
    """

    sees: torch.Tensor
    depths: torch.Tensor
    num_nodes: npt.NDArray[np.int32]


@define(kw_only=True, eq=False)
class AttentionBatch:
    """One step's batch as a group sees it. Host copies are numpy; the core never rewrites what it handed out
    while a copy may still read it.

    Attributes:
        num_requests, num_tokens: without padding.
        max_query_len, max_seq_len: over the requests of this batch.
        query_start_loc: [num_requests + 1] int32, prefix sums of query lengths, starts with 0, non-decreasing.
        seq_lens: [num_requests] int32, tokens in the cache once this step has written.
        block_table: [num_requests, max_blocks] int32, kernel blocks.
        slot_mapping: [num_tokens] int64; of layers of type ``cross``, an entry for each key to store.
        positions: [num_tokens] int64.
        query_start_loc_cpu, seq_lens_cpu: the same on the host; where the backend declares `bounded_lengths`,
            `seq_lens_cpu` and `max_seq_len` may be more than `seq_lens`, never less.
        num_decodes: requests at the front of the batch with one query token each.
        causal: False for encoders, and for layers that read what one gave.
        common_prefix_len: tokens at the start of all requests that lie in the same kernel blocks and are to be served
            once for all; 0 for none. `common_prefix` is the same on the device, [1] int32, None for none.
        tree: where drafts stand as a tree, else None.
    """

    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    query_start_loc_cpu: npt.NDArray[np.int32]
    seq_lens_cpu: npt.NDArray[np.int32]
    num_decodes: int = 0
    causal: bool = True
    common_prefix_len: int = 0
    common_prefix: torch.Tensor | None = None
    tree: TreeMask | None = None
    extras: dict[str, Any] = field(factory=dict)


class AttentionBackend(Protocol):
    """What a built attention backend can do. Tensors are on the negotiated device and of the negotiated dtype."""

    def plan(self, batch: AttentionBatch) -> Any:
        """Host work of one step, outside graphs. The result is handed to every `write` and `forward` of the step."""
        ...

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Any) -> None:
        """Store new keys [num_tokens, num_kv_heads, head_size] and values at the step's `slot_mapping`."""
        ...

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Attention of `query` [num_tokens, num_heads, head_size] over the cache, new tokens included.

        Writes [num_tokens, num_heads, head_size_v] into `out`; `key` and `value` are the step's new ones, for
        backends that read them from there. `sinks` is [num_heads]. Inputs other than the cache stay unchanged.
        Returns the LSE [num_heads, num_tokens] float32 where the backend declares it, else None.
        """
        ...


class CascadeBackend(AttentionBackend, Protocol):
    """What a built backend can do besides, where `cascade` is declared."""

    def use_cascade(
        self, common_prefix_len: int, query_lens: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64]
    ) -> bool:
        """Whether serving a common prefix apart pays for such a batch. Host work; called before the step is planned.

        Args:
            common_prefix_len: tokens that all requests share, above 0.
            query_lens, seq_lens: [num_requests], as in the batch.
        """
        ...
