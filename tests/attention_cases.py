"""Batches for attention backends, in surroundings that punish a wrong read or write.

Everything that a backend must not read is NaN: the null block, slots past a request's length, a poison block that
unused entries of a block table point to, and padded rows. Block ids are shuffled, and K and V are strided views of one
buffer.
"""

from __future__ import annotations

from typing import Any

import attention_oracle as oracle
import numpy as np
import torch
from attrs import define, evolve

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache

POISON_BLOCK = 1
SENTINEL = 123.0


@define(kw_only=True)
class Case:
    """A batch of requests (query tokens, sequence length) and the layer that sees it."""

    requests: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 80
    head_size_v: int | None = None
    block_size: int = 16
    layout: str = "NHD"
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True
    attention_type: str = "decoder"
    amplitude: float = 1.0
    padding: int = 3
    seed: int = 0

    def layer(self) -> AttentionLayer:
        return AttentionLayer(
            name="model.layers.0.self_attn",
            index=0,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v or self.head_size,
            scale=self.head_size**-0.5,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            attention_type=self.attention_type,
        )

    def context(self) -> AttentionContext:
        return AttentionContext(
            contract=1,
            layers=(self.layer(),),
            device="cpu",
            dtype=str(self.dtype).removeprefix("torch."),
            kv_dtype=str(self.kv_dtype or self.dtype).removeprefix("torch."),
            block_size=self.block_size,
            kernel_block_size=self.block_size,
            layout=self.layout,
            max_query_len=8192,
            max_requests=256,
            max_tokens=8192,
            max_model_len=65536,
        )


class World:
    """A case made real: dense keys and values per request, and the paged cache that holds all but the new tokens."""

    def __init__(self, case: Case) -> None:
        self.case, self.layer = case, case.layer()
        self.rng = torch.Generator().manual_seed(case.seed)
        kv_dtype = case.kv_dtype or case.dtype
        lengths, heads = [length for _, length in case.requests], case.num_kv_heads
        self.keys = [self._random(n, heads, case.head_size).to(kv_dtype) for n in lengths]
        self.values = [self._random(n, heads, self.layer.head_size_v).to(kv_dtype) for n in lengths]
        self.queries = [
            (self._random(q, case.num_heads, case.head_size) * case.amplitude).to(case.dtype) for q, _ in case.requests
        ]
        self.sinks = self._random(case.num_heads).to(case.dtype) if case.sinks else None
        self._build_tables()
        self.cache = self._empty_cache(kv_dtype)
        for request, (query_len, length) in enumerate(case.requests):
            self._store(request, range(length - query_len))
        self.batch = self._batch()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng)

    def _build_tables(self) -> None:
        size = self.case.block_size
        needed = [-(-length // size) for _, length in self.case.requests]
        self.num_blocks = sum(needed) + 5
        ids = (torch.randperm(self.num_blocks - 2, generator=self.rng) + 2).tolist()
        self.block_table = torch.full((len(needed), max(needed, default=0) + 2), POISON_BLOCK, dtype=torch.int32)
        for request, count in enumerate(needed):
            for i in range(count):
                self.block_table[request, i] = ids.pop()

    def _empty_cache(self, dtype: torch.dtype) -> KVCache:
        c, n, size = self.case, self.num_blocks, self.case.block_size
        total = c.head_size + self.layer.head_size_v
        buffer = torch.full((n, size * c.num_kv_heads * total), torch.nan, dtype=dtype)
        cut = size * c.num_kv_heads * c.head_size
        shape = (size, c.num_kv_heads) if c.layout == "NHD" else (c.num_kv_heads, size)
        views = [part.view(n, *shape, -1) for part in (buffer[:, :cut], buffer[:, cut:])]
        return KVCache(*(v if c.layout == "NHD" else v.transpose(1, 2) for v in views))

    def slot(self, request: int, position: int) -> int:
        size = self.case.block_size
        return int(self.block_table[request, position // size]) * size + position % size

    def _store(self, request: int, positions: range) -> None:
        for position in positions:
            block, offset = divmod(self.slot(request, position), self.case.block_size)
            self.cache.key[block, offset] = self.keys[request][position]
            self.cache.value[block, offset] = self.values[request][position]

    def _batch(self) -> AttentionBatch:
        requests = self.case.requests
        query_lens = [q for q, _ in requests]
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        lens = np.array([length for _, length in requests], dtype=np.int32)
        positions = [p for q, length in requests for p in range(length - q, length)]
        slots = [self.slot(r, p) for r, (q, length) in enumerate(requests) for p in range(length - q, length)]
        decodes = next((i for i, q in enumerate(query_lens) if q != 1), len(query_lens))
        return AttentionBatch(
            num_requests=len(requests),
            num_tokens=int(starts[-1]),
            max_query_len=max(query_lens, default=0),
            max_seq_len=int(lens.max(initial=0)),
            query_start_loc=torch.from_numpy(starts.copy()),
            seq_lens=torch.from_numpy(lens.copy()),
            block_table=self.block_table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
            num_decodes=decodes,
            causal=self.case.causal,
        )

    def _padded(self, rows: list[torch.Tensor], fill: float) -> torch.Tensor:
        joined = torch.cat(rows)
        return torch.cat([joined, torch.full((self.case.padding, *joined.shape[1:]), fill, dtype=joined.dtype)])

    def new_tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of the step, padded with NaN rows."""
        new = [
            [
                dense[length - q :].to(self.case.dtype)
                for dense, (q, length) in zip(every, self.case.requests, strict=True)
            ]
            for every in (self.keys, self.values)
        ]
        query, key, value = (self._padded(rows, torch.nan) for rows in (self.queries, *new))
        return query, key, value

    def run(self, backend: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step: plan, write, forward. Returns out and LSE without padding; checks that inputs stay as they were."""
        query, key, value = self.new_tokens()
        before = [t.clone() for t in (query, key, value, self.block_table, self.batch.slot_mapping)]
        out = torch.full((query.shape[0], self.case.num_heads, self.layer.head_size_v), SENTINEL, dtype=self.case.dtype)
        plan = backend.plan(self.batch)
        backend.write(self.layer, key, value, self.cache, plan)
        stored = [bits(view) for view in self.cache]
        lse = backend.forward(self.layer, query, key, value, self.cache, plan, out, self.sinks)
        after = [query, key, value, self.block_table, self.batch.slot_mapping]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, after, strict=True)), "an input was changed"
        assert all(torch.equal(a, bits(b)) for a, b in zip(stored, self.cache, strict=True)), "forward wrote the cache"
        assert torch.isfinite(out).all(), "padding rows must be finite"
        tokens = self.batch.num_tokens
        return out[:tokens], None if lse is None else lse[:, :tokens]

    def answers(self, dtype: torch.dtype = torch.float64) -> list[oracle.Answer]:
        c = self.case
        options = {"scale": self.layer.scale, "window": c.window, "soft_cap": c.soft_cap, "causal": c.causal}
        return [
            oracle.attention(q, k, v, sinks=self.sinks, dtype=dtype, **options)
            for q, k, v in zip(self.queries, self.keys, self.values, strict=True)
        ]

    def check(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        start = 0
        kv_dtype = self.case.kv_dtype or self.case.dtype
        coarse = max((self.case.dtype, kv_dtype), key=lambda d: torch.finfo(d).eps)
        for request, (exact, eager) in enumerate(zip(self.answers(), self.answers(coarse), strict=True)):
            stop = start + exact.out.shape[0]
            if stop == start:
                continue
            allowed = oracle.tolerance(exact, eager, self.values[request], coarse)
            error = float((out[start:stop].double() - exact.out).abs().max())
            assert error <= allowed, f"request {request} {self.case.requests[request]}: error {error} > {allowed}"
            if lse is not None:
                error = float((lse[:, start:stop].double() - exact.lse).abs().max())
                baseline = float((eager.lse - exact.lse).abs().max())
                limit = 3 * baseline + 16 * torch.finfo(torch.float32).eps * (1 + exact.max_score) + 1e-6
                assert error <= limit, f"request {request}: LSE error {error} > {limit}"
            start = stop

    def changed(self, **changes: Any) -> World:
        return World(evolve(self.case, **changes))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8).clone()
