"""The attention contract, version 1.

A backend is built once for an attention group, that is, for layers with equal attention needs. If the model is divided
over pipeline stages, it is built once for each stage that has layers of the group. In each step the core calls `plan`
once for the group, on the host. Then it calls, for each layer, `write` (unless the backend writes inside `forward`) and
`forward`.

Meaning of the inputs:

* A window of W tokens lets a query see W keys, its own included: query position i sees keys max(0, i - W + 1) .. i.
* A chunk of C tokens lets a query see its own chunk: query position i sees keys i // C * C .. i.
* `slot_mapping` gives each new token's slot, `kernel_block * kernel_block_size + offset`. Slot -1 is never written.
* Kernel block 0 is the null block, which is never read. Block tables hold 0 where a request has no block.
* Entries of a block table past a request's last block, and slots past its length, hold garbage (NaN in tests).
* `seq_lens` includes the new tokens. The queries of a request are its last tokens (bottom-right causal alignment).
* In a layer with multi-head latent attention (`AttentionLayer.mla`), all heads share the key: the latent followed by
  the rotary part. Its first `head_size_v` numbers are also the value. The model multiplies the projections from the
  latent into queries and outputs ("absorbed", DeepSeek-V2, arXiv 2405.04434, section 2.1.2), so attention has one KV
  head. The cache holds only keys, and `KVCache.value` is a view of them: `write` stores the key and ignores `value`. In
  an eight-bit cache the key's scale is used and the value's has no meaning.
* Layers of type ``encoder_only`` keep nothing. A request's keys are its tokens of this step, and every token sees all
  of them (`causal` is False). The batch has a block table without columns and slots -1, and the cache has no blocks.
  `write` is called and must store nothing. A window of W tokens lets query position i see keys i - W + 1 .. i + W - 1
  of its request. It is given only to a backend that declares `encoder_window`.
* Layers of type ``cross`` read all keys that an encoder produced for a request (`causal` is False). `seq_lens` counts
  these keys, and `max_model_len` bounds them. They are stored in the step that computes the request's first token.
  `slot_mapping` has one entry for each key that the step stores, request after request: none in most steps, more than
  query tokens in some. `write` gets the same number of keys and values.
* ALiBi (`AttentionLayer.alibi_slopes`, Press et al. 2021, arXiv 2108.12409): after the soft cap, a query at position i
  adds ``slope * (j - i)`` to its score with the key at position j. Each query head has its own slope. The LSE includes
  the bias. Tree nodes use their `positions`. ALiBi is defined for causal attention of type ``decoder``.
* Tokens of an image may see all of that image, also what comes after them (`AttentionLayer.keys_ahead`). A batch with
  `keys_ahead` says, for each query token, how many keys after its own position it sees too: position i sees keys up to
  i + keys_ahead, with a window those from i - W + 1 on. They are tokens of the same step and request. Layers without
  the flag ignore it. Such a batch has no common prefix and is never captured.
  It may have a tree, whose nodes see nothing ahead.
* A position bias (`AttentionLayer.position_bias`, Raffel et al. 2020, arXiv 1910.10683, section 2.1) is added where
  ALiBi's would be: to the score of a query at position i with the key at position j, the head's number for the distance
  i - j, the last one for all greater distances. It is defined for causal attention of type ``decoder``.
* An index (`AttentionLayer.index_topk`, "DeepSeek-V3.2", arXiv 2512.02556, section 2.1) picks the keys that a query
  attends to. It has keys of its own, one vector for each token, which the cache holds beside the layer's keys. The
  score of key j for a query is ``sum over heads h of index_weight[h] * max(0, index_query[h] . index_key_j)``, in
  float32. Of the keys that the query would see without an index it attends to the `index_topk` with the highest
  scores, and to all if there are no more. Of equal scores the lower positions are taken. The inputs ``index_query``
  [num_tokens, index heads, index head size], ``index_key`` [num_tokens, index head size] and ``index_weight``
  [num_tokens, index heads] float32 come with the layer. A layer with `index_from` has no such inputs and keeps no such
  keys: each of its queries attends to the keys that the same query picked in that layer, which was called earlier in
  the same step, for the same backend object and plan.
* A request may have zero query tokens. Rows `num_tokens..` of padded tensors are padding: any finite output is valid.
* A returned LSE is in the base that the descriptor declares, and counts a sink as one more key.
* A padded request (see below) may have query tokens and a length of 0, captured or not: any finite output is valid.
* If `lse` is declared, the cache may hold only a part of the keys (context shards). A request of one query token then
  has a length that counts the keys in this part, and slot -1 if its own key is in another part. The query sees the keys
  that the cache holds.

If `graphs` is declared, `write` and `forward` may be captured once for a batch shape and replayed:

* `plan` is called outside the graph, at the capture and before each replay, with a batch of the captured shape. The
  batch's tensors have the same addresses as at the capture. Host copies and plans are new objects.
* A captured kernel reads changing values from those tensors, or from the backend's own buffers, which `plan` refills
  without waiting for the device. Decisions made on the host (splits, grids) must be valid for every batch of the shape.
* The capture uses a dummy batch: the longest sequences, null blocks, slots -1. Smaller batches are padded. If query
  lengths are equal, the padding requests have that query length, sequence length 0 and slots -1. Otherwise they have no
  query tokens. Padded rows may hold any finite values.

An eight-bit cache (a cache dtype of one byte) holds ``x / scale``, computed in float32, clamped to the dtype's finite
range and rounded to nearest even. Values that are read are multiplied by ``scale``. A layer's scales are 1 unless the
context's `kv_scales` gives others. Scales other than 1 require a backend that declares `kv_scales`.

If `tree_mask` is declared, a batch may have a `tree`: the last query tokens of some requests are drafts in the form of
a tree. They take consecutive slots like other tokens. Of the nodes, a node sees only those on its own path, and
`positions` gives the position that it would have in a text. Windows and chunks are counted in these positions. Tokens
before the nodes are seen as usual. A batch with one tree for all requests is never captured.

If `request_trees` is declared too, `TreeMask.sees` and `depths` may have a first dimension of requests: each request
then has a tree of its own. A request's query tokens may be only the last of its nodes. The others are in the cache. If
graphs are declared, a batch of such trees may be captured: a captured kernel reads the trees from `sees`, `depths` and
`num_nodes_device`, which have the same addresses in each replay. A backend whose trees cannot be captured declares
``Limit(when="request_trees", capability="graphs", offer=Level(GraphSupport.NEVER))``.

If `block_events` is declared, the core tells the backend before `plan` which kernel blocks have changed hands since the
step before. What steps write to a block the backend sees in `write`; what comes otherwise, as with a cached prefix that
another request computed or that a connector copied in, is in these events.

If `cascade` is declared:

* A batch whose requests all begin with the same kernel blocks may have a `common_prefix_len` above 0: a multiple of the
  kernel block size, at most the number of tokens that each request had in the cache before this step. The keys of these
  positions can be read once for all queries, without a mask, and merged with the rest by LSE. The result is the same as
  without cascade.
* It is set only if `use_cascade` of every group concerned returns True, for layers without window or chunk.
* If graphs are declared too, batches with and without a common prefix are different shapes. The capture uses the
  longest prefix. Replays have any prefix above 0, and a captured kernel reads its length from `common_prefix`. A
  backend whose cascade cannot be captured declares ``Limit(when="cascade", capability="graphs",
  offer=Level(GraphSupport.NEVER))``.
* A padded request has a length of 0, below the common prefix, and only null blocks.
* If `cascade_prefixes` says so, prefixes of groups of requests may be served apart as well, see
  `slotline.registry.contracts.prefix_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from attrs import define, field, frozen

from slotline.registry.capability import Align, Choice, Flag, GraphSupport, Level, Limit, Max, Range, Set, Support
from slotline.registry.contracts.cache_tensors import PLAIN, CacheTensors
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from slotline.registry.contracts.block_events import BlockEvents
    from slotline.registry.contracts.prefix_groups import PrefixGroups


INDEX_INPUTS = ("index_query", "index_key", "index_weight")
"""Names of the inputs of a layer whose index picks keys (`AttentionLayer.index_topk`)."""


@frozen
class LayerInput:
    """Tensor that a layer gets from its model beside query, key and value, one row for each token of the step.

    Attributes:
        name: unique in its layer. Backends declare the names that they know (`AttentionCapabilities.layer_inputs`).
        shape: of one token.
        dtype: name of a torch dtype, "" for that of the activations.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = ""


@frozen(kw_only=True, field_transformer=declared)
class AttentionCapabilities:
    """Capabilities that an attention backend declares.

    Attributes:
        devices: device types it runs on.
        min_compute_capability: lowest CUDA (major, minor), None for any.
        dtypes: pairs (dtype, cache dtype) that work together, e.g. ``("bfloat16", "float8_e4m3fn")``.
        head_sizes: sizes of a query and key head.
        different_value_head: a value head may have another size.
        group_sizes: query heads per KV head.
        kernel_block_sizes: tokens in one block as the kernel sees it.
        preferred_block_sizes: the kernel block sizes with the fastest kernels, `Align()` for no preference. A limit can
            restrict the preference to some layers: ``Limit(when="mla", capability="preferred_block_sizes", ...)``. If
            ``cache.block_size`` is ``auto``, the nearest preferred size is taken, provided that all groups accept it.
            The preference never decides which backend is chosen.
        layouts: physical orders of a page, preferred first: ``NHD`` (token, head, dim) or ``HND`` (head, token, dim).
        attention_types: some of ``decoder``, ``encoder_only``, ``cross``.
        query_len: most query tokens of one request in a batch.
        sliding_window, chunked, soft_cap, sinks, alibi, tree_mask: supported features. `chunked` is attention within
            chunks (`AttentionLayer.chunk`), `alibi` is a linear bias by distance (`AttentionLayer.alibi_slopes`).
            `sliding_window` is about layers of type ``decoder``.
        request_trees: support for a tree of its own for each request, captured too if graphs are.
        position_bias: support for a learned bias by head and distance (`AttentionLayer.position_bias`).
        encoder_window: support for windows in layers of type ``encoder_only``, in both directions.
        keys_ahead: support for tokens that see later ones of the same step (`AttentionBatch.keys_ahead`).
        index_topk: support for layers whose index picks keys (`AttentionLayer.index_topk`). Their inputs are declared
            in `layer_inputs`, and the format of their cache in `cache_formats`.
        mla: support for multi-head latent attention, with the key sizes of `latent_sizes` (latent and rotary part
            together). `head_sizes` and `different_value_head` do not apply then.
        cascade: support for a shared prefix that is read once for all requests. The backend is a `CascadeBackend` then.
        cascade_prefixes: prefixes that it serves so: ``one`` of all requests of a batch, or also those of ``groups`` of
            requests, or of groups at several ``levels`` (see `slotline.registry.contracts.prefix_groups`).
        kv_scales: support for the scales of eight-bit caches.
        cache_formats: formats of caches that it reads and writes (see `slotline.registry.contracts.cache_tensors`). For
            a format other than ``plain``, `write` and `forward` get `CacheTensors` as their cache.
        layer_inputs: names of inputs beside query, key and value that it reads. A layer with others is refused.
        edges: computations at the edges of attention that it takes over from the model, by their names in
            `slotline.registry.contracts.attention_edges`. A model computes the others itself.
        block_events: it hears of blocks that change hands, since it keeps something for each block. The backend is a
            `BlockListener` then.
        scores: it tells how much the last tokens of a request attend to each key. The backend is a `ScoringBackend`
            then.
        graphs: the batches that `forward` can be captured for.
        plan_once: the result of `plan` at a capture is valid for every replay, and `plan` fills no buffers of the
            backend. Replays then need no planning, and one graph can hold several steps.
        lse: `forward` can return the log-sum-exp, in base `lse_base` (``e`` or ``2``).
        writes_cache: True if `forward` stores the new keys and values itself. `write` is not called then.
        plain_writes: True if `write` only stores keys and values of the cache's own dtype unchanged. The code that
            computes them may then store them itself, and `write` is not called.
        several_plans: True if a plan stays valid after `plan` was called for another batch. A step can then have one
            plan for all its query tokens and one for some of them.
        any_strides: True if the tokens and the heads of query, key, value and `out` may have any strides, zero of an
            expanded query, key or value among them, and the block table may be a slice of a wider one. Without it heads
            of query, value and `out` lie behind each other, as merged projections have them. The last dimension is
            contiguous in any case.
        bounded_lengths: True if the lengths on the host (`AttentionBatch.seq_lens_cpu` and `max_seq_len`) may be upper
            bounds while `seq_lens` on the device is exact. The host then prepares a step before it knows the accepted
            drafts of the previous step. Nothing may be read, written or masked by the host's lengths.
        lowest_score: the lowest product of a query and a key, before `scale`, that is distinguished from a masked
            score. None for no limit, as when masked scores are minus infinity.
        batch_invariant: if the context asks for it, a token's output is bitwise independent of the rest of the batch
            and of how its request is divided into steps.
        workspace: None, or a function from the `AttentionContext` to the bytes that the backend needs on its device
            beside caches, for instance for partial results. The plan shows them, and they are taken before the pool
            is sized. The context has them as `workspace`. The function imports no torch.
        exact: False for a backend that approximates, for instance by leaving keys out. It is refused (N184) unless
            the configuration names it or sets `attention.approximate`. It attends to all keys if the context's `exact`
            is True.
        limits: offers that shrink when another feature is needed.
        priority: `auto` prefers the higher number on this device. Give the reason in `priority_reason`.
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
    encoder_window: Flag = Flag(Support.NOT_IMPLEMENTED)
    keys_ahead: Flag = Flag(Support.NOT_IMPLEMENTED)
    chunked: Flag = Flag(Support.NOT_IMPLEMENTED)
    soft_cap: Flag = Flag(False)
    sinks: Flag = Flag(False)
    alibi: Flag = Flag(Support.NOT_IMPLEMENTED)
    position_bias: Flag = Flag(Support.NOT_IMPLEMENTED)
    index_topk: Flag = Flag(Support.NOT_IMPLEMENTED)
    tree_mask: Flag = Flag(Support.NOT_IMPLEMENTED)
    request_trees: Flag = Flag(Support.NOT_IMPLEMENTED)
    mla: Flag = Flag(Support.NOT_IMPLEMENTED)
    latent_sizes: Range = Range()
    cascade: Flag = Flag(Support.NOT_IMPLEMENTED)
    cascade_prefixes: Literal["one", "groups", "levels"] = "one"
    kv_scales: Flag = Flag(Support.NOT_IMPLEMENTED)
    layer_inputs: Set[str] = Set(())
    edges: Set[str] = Set(())
    cache_formats: Set[str] = Set((PLAIN,))
    block_events: bool = False
    scores: Flag = Flag(Support.NOT_IMPLEMENTED)
    graphs: Level[GraphSupport] = Level(GraphSupport.NEVER)
    plan_once: Flag = Flag(False)
    lse: Flag = Flag(False)
    lse_base: str = "e"
    writes_cache: bool = False
    plain_writes: bool = False
    several_plans: bool = False
    any_strides: bool = False
    bounded_lengths: bool = False
    lowest_score: float | None = None
    batch_invariant: Flag = Flag(False)
    exact: Flag = Flag(True)
    workspace: Callable[[AttentionContext], int] | None = None
    min_compute_capability: tuple[int, int] | None = None
    limits: tuple[Limit, ...] = ()
    priority: int = 0
    priority_reason: str = ""


@frozen(kw_only=True)
class AttentionLayer:
    """Static facts of one attention layer.

    Attributes:
        name: the module's path in the model.
        index: position among the model's attention layers, from 0.
        num_heads, num_kv_heads, head_size, head_size_v: the shape.
        scale: factor on the scores before the soft cap.
        window: tokens that a query may see, itself included. None for all. In a layer of type ``encoder_only`` as many
            in each direction.
        chunk: tokens of a chunk if attention stays within chunks: query i sees keys i // chunk * chunk .. i. None for
            no chunks. A layer has a window or a chunk, not both.
        soft_cap: scores become ``cap * tanh(score / cap)``. None for no cap.
        sinks: True if the layer has a learned sink logit per query head.
        alibi_slopes: for each query head, the amount that a score loses per token of distance between query and key.
            None for no bias. All layers of a group have the same slopes.
        position_bias: for each query head, what is added to a score by the distance between query and key: from 0, the
            last for all that are farther. None for no bias. All layers of a group have the same, which never changes.
        mla: True if keys are latents that contain their values. There is one KV head, and the value of a key is its
            first `head_size_v` numbers.
        kv_kind: kind of cache that the layer needs, e.g. ``full`` or ``sliding``.
        attention_type: ``decoder``, ``encoder_only`` or ``cross``.
        shares_kv_with: index of the layer whose cache it reads, None for its own.
        keys_ahead: True if a batch's `keys_ahead` applies. Such a layer has neither chunks nor ALiBi.
        index_topk: most keys that a query attends to, picked by an index. None for all.
        index_from: index of the earlier layer whose picks it uses, None for its own.
        inputs: what the model hands over beside query, key and value. If there are any, `write` and `forward` get one
            more argument by name, ``inputs``: a mapping from their names to tensors [num_tokens, *shape].
        edges: computations at its edges that the model can leave to a backend, by their names in
            `slotline.registry.contracts.attention_edges`. Only layers of type ``decoder`` with a cache of their own
            have some.
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
    position_bias: tuple[tuple[float, ...], ...] | None = field(default=None, repr=False)
    mla: bool = False
    kv_kind: str = "full"
    attention_type: str = "decoder"
    shares_kv_with: int | None = None
    keys_ahead: bool = False
    index_topk: int | None = None
    index_from: int | None = None
    inputs: tuple[LayerInput, ...] = ()
    edges: tuple[str, ...] = field(default=(), repr=False)


class KVCache(NamedTuple):
    """Cache of one layer: two views that look the same in every physical layout.

    Both have shape [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size]. Strides follow the layout, and the
    last dimension is contiguous. Kernel block 0 is the null block. With `AttentionLayer.mla` the value is the key's
    first `head_size_v` numbers, in the same memory.
    """

    key: torch.Tensor
    value: torch.Tensor


LayerCache = KVCache | CacheTensors
"""Cache of one layer. In the format ``plain`` it is a `KVCache`."""


class KVScales(NamedTuple):
    """Scales of one layer's eight-bit cache: [] float32 each, on the device.

    Their addresses never change. Their values may change until the first token of the first request is stored, if they
    are calculated from that token. Kernels therefore read them on the device, and no copy may be kept on the host.
    """

    key: torch.Tensor
    value: torch.Tensor


class CacheSlots(NamedTuple):
    """Destination of the new keys and values of one layer in a step.

    Attributes:
        cache: the layer's cache.
        slot_mapping: [num_tokens] int64, `kernel_block * kernel_block_size + offset`. -1 for a token without a slot.
    """

    cache: KVCache
    slot_mapping: torch.Tensor


@frozen(kw_only=True)
class AttentionContext:
    """Input of a backend's factory: the negotiated values and the plugin's own options.

    Attributes:
        contract: the bound contract version.
        layers: the layers of the group. With pipeline stages, those of one stage.
        device: torch device string. A CUDA device is the current device in every call.
        dtype, kv_dtype: names such as ``bfloat16``.
        block_size, kernel_block_size: tokens of a manager block and of a kernel block.
        layout: ``NHD`` or ``HND``.
        cache_format: format of the layers' caches.
        max_query_len, max_requests, max_tokens, max_model_len: bounds on every batch.
        kv_scales: by layer index, the scales of an eight-bit cache. A layer without an entry has scales of 1.
        batch_invariant: True if the plan relies on the capability of that name.
        workspace: [bytes] uint8 on the device, as many as `AttentionCapabilities.workspace` gives for this context. Its
            contents mean nothing before each `plan`. None if nothing is declared.
        exact: True if a backend that approximates must attend to all keys. The conformance suite asks for it where it
            compares with full attention.
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
    cache_format: str = PLAIN
    exact: bool = False
    workspace: torch.Tensor | None = None
    options: Any = None


class TreeMask(NamedTuple):
    """Drafts in the form of a tree.

    Attributes:
        sees: [k, k] bool on the device, True if node j is on the path of node i. A node sees itself and no later node.
            [num_requests, k, k] for a tree of its own for each request.
        depths: [k] int64 on the device, the nodes' offsets after the known tokens, from 0. [num_requests, k] like
            `sees`.
        num_nodes: [num_requests] int32 on the host. A request's last tokens are the first `num_nodes` nodes.
        num_nodes_device: the same on the device. Given if each request has a tree of its own.
    """

    sees: torch.Tensor
    depths: torch.Tensor
    num_nodes: npt.NDArray[np.int32]
    num_nodes_device: torch.Tensor | None = None


@define(kw_only=True, eq=False)
class AttentionBatch:
    """Attention inputs of one group for one step.

    Host copies are numpy arrays. The core never overwrites an array while a copy to the device may still read it.

    Attributes:
        num_requests, num_tokens: without padding.
        max_query_len, max_seq_len: over the requests of this batch.
        query_start_loc: [num_requests + 1] int32, prefix sums of query lengths, starts with 0, non-decreasing.
        seq_lens: [num_requests] int32, tokens in the cache once this step has written.
        block_table: [num_requests, max_blocks] int32, kernel blocks.
        slot_mapping: [num_tokens] int64. For layers of type ``cross``, one entry for each key to store.
        positions: [num_tokens] int64.
        query_start_loc_cpu, seq_lens_cpu: the same on the host. If the backend declares `bounded_lengths`,
            `seq_lens_cpu` and `max_seq_len` may be larger than `seq_lens`, never smaller.
        num_decodes: requests at the front of the batch with one query token each.
        causal: False for encoders and for layers that read an encoder's output.
        common_prefix_len: tokens at the start of all requests that lie in the same kernel blocks and are to be read
            once for all requests. 0 for none. `common_prefix` is the same on the device, [1] int32, None for none.
        prefix_groups: prefixes that groups of requests share and that are to be read once for each group, only for
            backends that declare them in `cascade_prefixes`. None for none.
        tree: the tree of drafts, None if there is none.
        keys_ahead: [num_tokens] int32, how many keys after its own position a query token sees. None for none, and in
            every batch without layers of that flag. `keys_ahead_cpu` is the same on the host.
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
    prefix_groups: PrefixGroups | None = None
    tree: TreeMask | None = None
    keys_ahead: torch.Tensor | None = None
    keys_ahead_cpu: npt.NDArray[np.int32] | None = None
    extras: dict[str, Any] = field(factory=dict)


class AttentionBackend(Protocol):
    """Protocol of a built attention backend. Tensors are on the negotiated device, in the negotiated dtype.

    In a cache format other than ``plain``, the cache that `write` and `forward` get is `CacheTensors`.

    For layers with `AttentionLayer.inputs`, and for no others, `write` and `forward` are called with ``inputs=`` too.
    If `edges` are declared, `forward` may be called with ``edges=`` (see `attention_edges`), and then without `write`.
    """

    def plan(self, batch: AttentionBatch) -> Any:
        """Do the host work of one step, outside graphs.

        The result is passed to every `write` and `forward` of the step. If its attribute `takes_edges` is False, the
        model computes the `edges` in this step, although the backend can. Without the attribute it does not.
        """
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
        """Compute attention of `query` [num_tokens, num_heads, head_size] over the cache, new tokens included.

        The result is written to `out` [num_tokens, num_heads, head_size_v]. `key` and `value` are the step's new ones,
        for backends that read them directly. `sinks` is [num_heads]. Inputs other than the cache stay unchanged.

        Returns:
            The LSE [num_heads, num_tokens] float32 if the backend declares it, else None.
        """
        ...


class CascadeBackend(AttentionBackend, Protocol):
    """Protocol of a built backend that declares `cascade`."""

    def use_cascade(
        self, common_prefix_len: int, query_lens: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64]
    ) -> bool:
        """Return True if reading the common prefix once is faster for a batch of this shape.

        This is host work, called before the step is planned.

        Args:
            common_prefix_len: number of tokens that all requests share, above 0.
            query_lens, seq_lens: [num_requests], as in the batch.
        """
        ...


class ScoringBackend(AttentionBackend, Protocol):
    """Protocol of a built backend that declares `scores`."""

    def attention_scores(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: LayerCache,
        blocks: torch.Tensor,
        num_keys: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return how much the last tokens of one request attend to each of its keys.

        Called between the layer's `forward` of an eager step and the next step. Nothing was planned for it.

        Args:
            layer: of type ``decoder``, with a cache of its own that holds all keys. It has no chunks, no latents and no
                bias by distance.
            query: [w, num_heads, head_size], of the last w tokens of the request. Query i sees the first
                ``num_keys - w + 1 + i`` keys, within the layer's window if it has one.
            cache: of the layer.
            blocks: [n] int64 on the device, the kernel blocks of the request, in order.
            num_keys: of the request, w at least.
            sinks: [num_heads], as for `forward`.

        Returns:
            [num_keys, num_kv_heads] float32: the probability of each key, the mean over the queries and over the query
            heads of the KV head. It is 0 for a query that does not see the key. A sink takes its part and is no key.
        """
        ...


class BlockListener(AttentionBackend, Protocol):
    """Protocol of a built backend that declares `block_events`."""

    def block_events(self, events: Sequence[BlockEvents]) -> None:
        """Hear which kernel blocks were returned, given, restored and loaded since the last step.

        Called on the host before the step is planned, if anything has happened, also before a step that is replayed
        from a graph or that needs no plan. Do not wait for the device. A block may be returned of which nothing was
        heard, since an exception escaped from a step. Keep what belongs to a layer by its index and the address of its
        cache: the conformance suite gives one object several caches.

        Args:
            events: of the cache group of the backend's layers, one at most.
        """
        ...
