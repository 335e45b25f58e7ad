"""Cases of attention checks: a batch and the layer that sees it, as plain data."""

from __future__ import annotations

import torch
from attrs import evolve, field, frozen

from slotline.registry.contracts.attention import INDEX_INPUTS, AttentionContext, AttentionLayer, KVScales, LayerInput
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES, PLAIN

NULL_BLOCK = 0
POISON_BLOCK = 1
FIRST_BLOCK = 2
"""Requests get blocks from here on."""
PLACES = ("null block", "poison block", "unused blocks", "unused slots", "gaps", "padding")
"""Where a backend must not read; each can be poisoned by itself."""


@frozen(kw_only=True)
class Case:
    """Batch and the layer that sees it.

    Attributes:
        requests: (query tokens, sequence length) of each request. The query tokens are the last ones.
        num_heads, num_kv_heads, head_size, head_size_v: shape of the layer. head_size_v None means head_size.
        block_size: tokens of a kernel block.
        manager_blocks: adjacent kernel blocks in one block of the manager.
        layout: physical order of a page, ``NHD`` or ``HND``.
        dtype, kv_dtype: dtypes of the activations and of the cache. kv_dtype None means dtype.
        kv_scales: scales of keys and values in an eight-bit cache, powers of two. None for 1 and 1.
        cache_format: format of the cache (see `slotline.registry.contracts.cache_tensors`). In one with codes the keys
            and values are of the case's dtype, and `kv_dtype` is None.
        scale: None for ``head_size ** -0.5``.
        mla: True if keys are latents that contain their values. There is one KV head then.
        window, soft_cap, sinks, causal, attention_type: as in `AttentionLayer`.
        alibi: True if query heads have slopes, those of ALiBi's section 3 for any number of heads.
        position_bias: True if query heads have a bias by distance, another for each of nine distances.
        beginning: requests whose encoder's keys the step stores, for the type ``cross``.
        request_parents: parents of a tree of its own for each request, in place of `parents`.
        parents, num_nodes: parents of a tree of drafts, and the number of its first nodes that are each request's last
            query tokens.
        images: (request, first position, position after the last) of new tokens that all see each other.
        keys_ahead: True if the layer heeds them.
        index_topk: most keys that an index picks for a query, as in `AttentionLayer`. The cache's format is then
            ``latent_index``.
        index_heads, index_size, index_amplitude: of the index, its heads, their size, and a factor on its weights.
        amplitude: factor on the queries.
        padding: rows after the last token.
        shuffled: True if block ids are permuted, False if they ascend.
        strided: True if K and V are views of one buffer with gaps, False if they are two plain tensors.
        merged: True if query, key and value are slices of wider tensors, each with its own strides.
        poisoned: those of `PLACES` that hold NaN. The others hold zeros.
        stale: True if slots behind a request's last token hold another request's old tokens, finite numbers, and not
            what `poisoned` says of unused slots. It is what engines hold that zero their memory once.
        freed_before_window: True if blocks completely before the window were freed and replaced by the null block.
        first_block: lowest block id of requests.
        spare_blocks: blocks of the manager without a request.
        max_query_len: bound given to the backend. None for slightly more than the batch needs.
        exact: False to let a backend approximate that does so.
        seed: seed of all values.
    """

    requests: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 80
    head_size_v: int | None = None
    block_size: int = 16
    manager_blocks: int = 1
    layout: str = "NHD"
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    kv_scales: tuple[float, float] | None = None
    cache_format: str = PLAIN
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    position_bias: bool = False
    mla: bool = False
    causal: bool = True
    attention_type: str = "decoder"
    beginning: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    request_parents: tuple[tuple[int, ...], ...] = ()
    num_nodes: tuple[int, ...] = ()
    images: tuple[tuple[int, int, int], ...] = ()
    keys_ahead: bool = False
    index_topk: int | None = None
    index_heads: int = 4
    index_size: int = 16
    index_amplitude: float = 1.0
    amplitude: float = 1.0
    padding: int = 3
    shuffled: bool = True
    strided: bool = True
    merged: bool = False
    poisoned: frozenset[str] = field(default=frozenset(PLACES), converter=frozenset)
    stale: bool = False
    freed_before_window: bool = False
    first_block: int = FIRST_BLOCK
    spare_blocks: int = 2
    max_query_len: int | None = None
    exact: bool = True
    batch_invariant: bool = False
    seed: int = 0

    def tree(self, request: int) -> tuple[int, ...]:
        """Return the parents of a request's tree, empty for none."""
        return self.request_parents[request] if self.request_parents else self.parents

    def path(self, node: int, request: int = 0) -> tuple[int, ...]:
        """Return the nodes on the path to a node, itself last."""
        return () if node < 0 else (*self.path(self.tree(request)[node], request), node)

    def positions(self, request: int) -> list[int]:
        """Return the position in a text of each token of a request. Nodes of a tree may share positions."""
        length, nodes = self.requests[request][1], self.num_nodes[request] if self.num_nodes else 0
        return [*range(length - nodes), *(length - nodes + len(self.path(node, request)) - 1 for node in range(nodes))]

    def seen(self, request: int) -> torch.Tensor | None:
        """Return the keys that the query tokens of a request see, [q, L] bool. None without a tree or images."""
        if not self.num_nodes:
            return self._seen_over_images(request) if self.keys_ahead else None
        query_len, length = self.requests[request]
        position, known = self.positions(request), length - self.num_nodes[request]

        def sees(own: int, key: int) -> bool:
            if self.window is not None and position[own] - position[key] >= self.window:
                return False
            return key <= own if own < known or key < known else key - known in self.path(own - known, request)

        return torch.tensor(
            [[sees(own, key) for key in range(length)] for own in range(length - query_len, length)], dtype=torch.bool
        ).view(query_len, length)

    def _seen_over_images(self, request: int) -> torch.Tensor:
        query_len, length = self.requests[request]
        key, own = torch.arange(length)[None, :], torch.arange(length - query_len, length)[:, None]
        seen = key <= own
        for of, first, end in self.images:
            if of == request:
                seen |= (own >= first) & (own < end) & (key >= first) & (key < end)
        return seen if self.window is None else seen & (key > own - self.window)

    def ahead(self) -> list[int]:
        """Return how many keys after its own each query token sees, request after request."""
        return [
            next((end - 1 - own for of, first, end in self.images if of == request and first <= own < end), 0)
            for request, (query_len, length) in enumerate(self.requests)
            for own in range(length - query_len, length)
        ]

    def friendly(self) -> Case:
        """Return the same batch without poison, shuffling, strides and padding."""
        return evolve(self, padding=0, shuffled=False, strided=False, merged=False, poisoned=(), stale=False)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of the cache."""
        return self.kv_dtype or self.dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the elements in the cache: that of codes, if the format has its own."""
        name = FORMAT_DTYPES.get(self.cache_format)
        return self.cache_dtype if name is None else getattr(torch, name)

    @property
    def coarse_dtype(self) -> torch.dtype:
        """Coarser of the two dtypes, in which a backend may compute. Eight-bit caches are dequantised first."""
        wide = [dtype for dtype in (self.dtype, self.cache_dtype) if dtype.itemsize > 1]
        return max(wide, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def alibi_slopes(self) -> tuple[float, ...] | None:
        """Slope of each query head: ``2 ** (-8 / num_heads)`` and its powers (Press et al. 2021, section 3)."""
        return tuple(2 ** (-8 * n / self.num_heads) for n in range(1, self.num_heads + 1)) if self.alibi else None

    @property
    def biases(self) -> tuple[tuple[float, ...], ...] | None:
        """Bias of each query head for distances from 0: numbers from -1.5 to 1.5 in no order."""
        if not self.position_bias:
            return None
        return tuple(
            tuple((7 * head + 5 * place) % 13 / 4 - 1.5 for place in range(9)) for head in range(self.num_heads)
        )

    @property
    def part_scales(self) -> tuple[float, float]:
        """Factors of stored keys and stored values. Values of latents are keys."""
        scale_k, scale_v = self.kv_scales or (1.0, 1.0)
        return scale_k, scale_k if self.mla else scale_v

    def scale_tensors(self, device: str) -> KVScales:
        """Return the scales as passed to a backend, new tensors in each call."""
        return KVScales(*(torch.tensor(scale, device=device) for scale in self.kv_scales or (1.0, 1.0)))

    def layer(self, index: int = 0) -> AttentionLayer:
        """Return the layer at index `index` of its group."""
        return AttentionLayer(
            name=f"model.layers.{index}.self_attn",
            index=index,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v or self.head_size,
            scale=self.head_size**-0.5 if self.scale is None else self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            position_bias=self.biases,
            mla=self.mla,
            kv_kind=self._kv_kind(),
            index_topk=self.index_topk,
            inputs=() if self.index_topk is None else self._index_inputs(),
            attention_type=self.attention_type,
            keys_ahead=self.keys_ahead,
        )

    def _kv_kind(self) -> str:
        if self.mla:
            return "mla" if self.index_topk is None else "dsa"
        return "full" if self.window is None else "sliding"

    def _index_inputs(self) -> tuple[LayerInput, ...]:
        heads, size = self.index_heads, self.index_size
        shapes = ((heads, size), (size,), (heads,))
        return tuple(
            LayerInput(name, shape, "float32" if name == "index_weight" else "")
            for name, shape in zip(INDEX_INPUTS, shapes, strict=True)
        )

    def context(self, device: str = "cpu", *, layers: int = 1) -> AttentionContext:
        """Return the factory's input for this case. `contract` and `options` are filled in by `Subject.build`."""
        longest = max((query_len for query_len, _ in self.requests), default=1)
        scales = () if self.kv_scales is None else range(layers)
        return AttentionContext(
            contract=1,
            layers=tuple(self.layer(index) for index in range(layers)),
            device=device,
            dtype=str(self.dtype).removeprefix("torch."),
            kv_dtype=str(self.stored_dtype).removeprefix("torch."),
            block_size=self.block_size * self.manager_blocks,
            kernel_block_size=self.block_size,
            layout=self.layout,
            max_query_len=self.max_query_len or max(longest, 1),
            max_requests=256,
            max_tokens=8192,
            max_model_len=65536,
            kv_scales={index: self.scale_tensors(device) for index in scales},
            batch_invariant=self.batch_invariant,
            cache_format=self.cache_format,
            exact=self.exact,
        )
