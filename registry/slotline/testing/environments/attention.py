"""Batches for attention backends, in surroundings that expose a wrong read or write.

A `Case` is plain data: requests, shapes, features, surroundings. A `World` contains its tensors: dense keys and values
per request, the paged cache that holds all but the new tokens, and the batch. By default the surroundings are hostile:

* Everything that must not be read is NaN: the null block, blocks and slots without a request, padded rows, and the gaps
  between the parts of the cache. Unused entries of a block table point to a poison block.
* Block ids are shuffled, and K and V are strided views of one buffer.
* `out` is inside a larger buffer whose other rows must not change.

`Case.friendly` removes all of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from attrs import evolve

from slotline.registry.contracts.attention import AttentionBatch, KVCache, TreeMask
from slotline.registry.contracts.cache_tensors import KEY_BOUNDS, CacheTensors
from slotline.testing.check import Failed, Run
from slotline.testing.environments.attention_case import FIRST_BLOCK, NULL_BLOCK, PLACES, POISON_BLOCK, Case
from slotline.testing.oracles import attention as oracle

__all__ = ["FIRST_BLOCK", "NULL_BLOCK", "PLACES", "POISON_BLOCK", "SENTINEL", "Case", "World", "bits", "threads"]

SENTINEL = 123.0
GUARD_ROWS = 2
OLD_VALUES = 64.0
"""Factor on the values of tokens that no request has any more."""
BACKEND_THREADS = 2
"""So many of torch's threads a backend is built and called with where a check wants work to be shared. All else uses
one: many small operations on several threads mostly wait for each other."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside, and the previous number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class World:
    """Tensors of a case on a device.

    Attributes:
        case, layer: the case and its layer.
        queries, keys, values: of each request, [q, H, D], [L, Hkv, D], [L, Hkv, Dv], on the host. Keys and values are
            the stored ones: if the cache has scales, the model's are larger by these factors.
        sinks: [H] or None.
        block_table, cache, batch: inputs of a backend.
        host_table, owned: the block table on the host, and the blocks of each request.
        buffers: [num_blocks, ...], the memory behind the cache.
        notes: request -> special properties, for messages.
    """

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case, self.layer, self.device = case, case.layer(), torch.device(device)
        self.notes: dict[int, str] = {}
        self._generator = torch.Generator().manual_seed(case.seed)
        lengths = [length for _, length in case.requests]
        self.keys = [self.key_of(n) for n in lengths]
        self.values = [self.value_of(key) for key in self.keys]
        self.queries = [self.random(q, case.num_heads, case.head_size, times=case.amplitude) for q, _ in case.requests]
        self.sinks = self.random(case.num_heads).to(self.device) if case.sinks else None
        table = self._tables()
        self.block_table = table.to(self.device)
        self.buffers, self.cache = self.empty_cache()
        for request in range(len(case.requests)):
            self.store(request)
        if case.stale:
            self.leave_old_tokens()
        self.batch = self.make_batch()

    def random(self, *shape: int, times: float = 1.0) -> torch.Tensor:
        """Return normal numbers of the case's dtype, on the host, different in each call."""
        return (torch.randn(*shape, generator=self._generator) * times).to(self.case.dtype)

    def key_of(self, length: int) -> torch.Tensor:
        """Return random keys [length, Hkv, D]."""
        return self.random(length, self.case.num_kv_heads, self.case.head_size).to(self.case.cache_dtype)

    def value_of(self, key: torch.Tensor) -> torch.Tensor:
        """Return values for keys [L, Hkv, D]: random ones, or those that latents contain."""
        if self.case.mla:
            return key[..., : self.layer.head_size_v]
        return self.random(*key.shape[:2], self.layer.head_size_v).to(self.case.cache_dtype)

    # Inputs of a backend

    def _tables(self) -> torch.Tensor:
        """Return the block table [num_requests, max_blocks + 2] int32, and set the number of blocks in the cache."""
        case = self.case
        each = case.block_size * case.manager_blocks
        needed = [-(-length // each) for _, length in case.requests]
        groups = torch.arange(sum(needed) + case.spare_blocks)
        if case.shuffled:
            groups = groups[torch.randperm(len(groups), generator=self._generator)]
        first = -(-case.first_block // case.manager_blocks) * case.manager_blocks
        ids = (groups[:, None] * case.manager_blocks + torch.arange(case.manager_blocks) + first).tolist()
        self.num_blocks = first + len(groups) * case.manager_blocks
        width = max(needed, default=0) * case.manager_blocks + 2
        table = torch.full((len(needed), width), POISON_BLOCK, dtype=torch.int32)
        self.owned = []
        for request, count in enumerate(needed):
            own = [block for _ in range(count) for block in ids.pop(0)]
            own = own[: -(-case.requests[request][1] // case.block_size)]
            freed = self._freed(request)
            own[:freed] = [NULL_BLOCK] * freed
            table[request, : len(own)] = torch.tensor(own, dtype=torch.int32)
            self.owned.append(own)
        self.host_table = table
        return table

    def _freed(self, request: int) -> int:
        """Return the number of leading blocks that lie before every query's window and were freed."""
        query_len, length = self.case.requests[request]
        if not self.case.freed_before_window or self.case.window is None:
            return 0
        return max(0, length - query_len - self.case.window + 1) // self.case.block_size

    def empty_cache(self) -> tuple[list[torch.Tensor], Any]:
        """Return new buffers [num_blocks, ...] and the two views of them, poisoned as the case requires."""
        case, n, size = self.case, self.num_blocks, self.case.block_size
        gap = 64 if case.strided else 0
        widths = (case.head_size,) if case.mla else (case.head_size, self.layer.head_size_v)
        parts = [size * case.num_kv_heads * width for width in widths]
        if case.strided:
            whole = torch.empty(n, sum(parts) + gap, dtype=case.cache_dtype, device=self.device)
            buffers, flat = [whole], list(whole[:, : sum(parts)].split(parts, dim=1))
        else:
            buffers = [torch.empty(n, part, dtype=case.cache_dtype, device=self.device) for part in parts]
            flat = list(buffers)
        shape = (size, case.num_kv_heads) if case.layout == "NHD" else (case.num_kv_heads, size)
        views = [part.unflatten(1, (*shape, -1)) for part in flat]
        views = [view if case.layout == "NHD" else view.transpose(1, 2) for view in views]
        cache = KVCache(views[0], views[0][..., : self.layer.head_size_v] if case.mla else views[1])
        self._poison(buffers, cache, sum(parts))
        return self._with_bounds(buffers, cache) if case.cache_format == KEY_BOUNDS else (buffers, cache)

    def _with_bounds(self, buffers: list[torch.Tensor], plain: KVCache) -> tuple[list[torch.Tensor], CacheTensors]:
        """Add the bounds of each block's keys to a plain cache. They are garbage until keys are put into a block."""
        case, gap = self.case, 64 if self.case.strided else 0
        shape = (2, case.num_kv_heads, case.head_size)
        buffer = torch.full((self.num_blocks, 2 * plain.key[0, 0].numel() + gap), self._garbage("unused blocks"))
        buffer = buffer.to(case.cache_dtype).to(self.device)
        bounds = buffer[:, : buffer.shape[1] - gap].unflatten(1, shape)
        return [*buffers, buffer], CacheTensors({"key": plain.key, "value": plain.value, KEY_BOUNDS: bounds})

    def _poison(self, buffers: list[torch.Tensor], cache: KVCache, end: int) -> None:
        rows = {"null block": [NULL_BLOCK], "poison block": [POISON_BLOCK]}
        owned = {block for own in self.owned for block in own} - {NULL_BLOCK}
        rows["unused blocks"] = sorted(set(range(FIRST_BLOCK, self.num_blocks)) - owned)
        rows["unused slots"] = sorted(owned)
        for place, blocks in rows.items():
            index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
            for view in cache:
                fill(view, index, self._garbage(place))
        for buffer in buffers:
            if buffer.shape[1] > end and self.case.strided:
                raw(buffer[:, end:]).copy_(raw(constant(self._garbage("gaps"), buffer)))

    def _garbage(self, place: str) -> float:
        return float("nan") if place in self.case.poisoned else 0.0

    def slots(self, request: int, positions: Sequence[int] | range) -> torch.Tensor:
        """Return the slots of some positions, [n] int64 on the host, with -1 for positions in freed blocks."""
        where = torch.as_tensor(list(positions), dtype=torch.int64)
        size = self.case.block_size
        blocks = self.host_table[request, where // size].long()
        return torch.where(blocks == NULL_BLOCK, -1, blocks * size + where % size)

    def store(self, request: int, positions: range | None = None) -> None:
        """Put keys and values of a request into the cache. Without positions, those before the new tokens."""
        query_len, length = self.case.requests[request]
        positions = range(length - query_len) if positions is None else positions
        self._put(request, positions, self.slots(request, positions))

    def _put(self, request: int, positions: range, slots: torch.Tensor) -> None:
        """Put keys and values of some positions into their slots, except slot -1."""
        kept = torch.as_tensor(list(positions), dtype=torch.int64)[slots >= 0]
        self.put(slots[slots >= 0], self.keys[request][kept], self.values[request][kept])

    def _bound(self, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Set the bounds of blocks to those of their keys up to the last of some slots in each."""
        for block in blocks.unique().tolist():
            keys = self.cache.key[block, : int(offsets[blocks == block].max()) + 1]
            self.cache[KEY_BOUNDS][block] = torch.stack([keys.amin(0), keys.amax(0)])

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the cache."""
        return self.cache.key, self.cache.value

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the cache, each with an entry for each kernel block."""
        return (*self.views, self.cache[KEY_BOUNDS]) if self.case.cache_format == KEY_BOUNDS else self.views

    # Changes of the cache that helpers make. Worlds of other caches have their own.

    def put(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, live: bool = True) -> None:
        """Put keys [n, Hkv, D] and values [n, Hkv, Dv] of the cache's dtype into slots [n] int64, on the host.

        Summaries of blocks count them if they are `live`, tokens of requests.
        """
        where = slots.to(self.device)
        place = (where // self.case.block_size, where % self.case.block_size)
        for view, dense in zip(self.views, (keys, values), strict=True):
            raw(view)[place] = raw(dense).to(self.device)
        if live and self.case.cache_format == KEY_BOUNDS:
            self._bound(*place)

    def leave_old_tokens(self) -> None:
        """Put old tokens behind the last token of each request, up to the end of its block."""
        size, slots = self.case.block_size, list[int]()
        for own, (_, length) in zip(self.owned, self.case.requests, strict=True):
            if length % size:
                slots += [own[-1] * size + offset for offset in range(length % size, size)]
        self.put_old_tokens(slots)

    def put_old_tokens(self, slots: Sequence[int]) -> None:
        """Put tokens of no request into slots: keys like all others, and values that show in an output."""
        if slots:
            key = self.random(len(slots), self.case.num_kv_heads, self.case.head_size).to(self.case.cache_dtype)
            value = key[..., : self.layer.head_size_v].float() * OLD_VALUES
            self.put(torch.tensor(slots), key, value.to(self.case.cache_dtype), live=False)

    def spoil(self, blocks: Sequence[int]) -> None:
        """Fill whole blocks with NaN."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for view in self.block_tensors:
            fill(view, index, float("nan"))

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block."""
        for view in self.block_tensors:
            raw(view)[target] = raw(view)[source]

    def new_keys(self, request: int) -> range:
        """Return the positions of the keys that the step stores.

        These are its new tokens, or all keys of an encoder at a request's begin.
        """
        query_len, length = self.case.requests[request]
        if self.case.attention_type == "cross":
            return range(length if request in self.case.beginning else 0)
        return range(length - query_len, length)

    def make_batch(self) -> AttentionBatch:
        """Return the step's batch from the case's requests and the block table."""
        requests = self.case.requests
        query_lens = [q for q, _ in requests]
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        lens = np.array([length for _, length in requests], dtype=np.int32)
        new = [range(length - q, length) for q, length in requests]
        stored = [self.slots(i, self.new_keys(i)) for i in range(len(requests))]
        slots = torch.cat([torch.empty(0, dtype=torch.int64), *stored])
        places = [self.case.positions(i)[each.start : each.stop] for i, each in enumerate(new)]
        positions = torch.tensor([position for each in places for position in each], dtype=torch.int64)
        pad = torch.full((self.case.padding,), -1)
        ahead = np.array(self.case.ahead(), np.int32)
        return AttentionBatch(
            num_requests=len(requests),
            num_tokens=int(starts[-1]),
            max_query_len=max(query_lens, default=0),
            max_seq_len=int(lens.max(initial=0)),
            query_start_loc=torch.from_numpy(starts.copy()).to(self.device),
            seq_lens=torch.from_numpy(lens.copy()).to(self.device),
            block_table=self.block_table,
            slot_mapping=torch.cat([slots, pad]).to(self.device),
            positions=torch.cat([positions, 0 * pad]).to(self.device),
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
            num_decodes=next((i for i, q in enumerate(query_lens) if q != 1), len(query_lens)),
            causal=self.case.causal,
            tree=self._tree(),
            keys_ahead=torch.from_numpy(ahead.copy()).to(self.device) if self.case.images else None,
            keys_ahead_cpu=ahead if self.case.images else None,
        )

    def _tree(self) -> TreeMask | None:
        case = self.case
        if not case.num_nodes:
            return None
        masks = [self._mask(request) for request in range(len(case.requests) if case.request_parents else 1)]
        sees, depths = (torch.stack(parts).to(self.device) for parts in zip(*masks, strict=True))
        num_nodes = np.array(case.num_nodes, np.int32)
        if not case.request_parents:
            return TreeMask(sees[0], depths[0], num_nodes)
        return TreeMask(sees, depths, num_nodes, torch.from_numpy(num_nodes.copy()).to(self.device))

    def _mask(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each node of a request's tree sees, [k, k] bool, and its depth, [k] int64."""
        paths = [self.case.path(node, request) for node in range(len(self.case.tree(request)))]
        sees = torch.tensor([[other in path for other in range(len(paths))] for path in paths])
        return sees, torch.tensor([len(path) - 1 for path in paths])

    def new_tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query [n, H, D], key [n, Hkv, D] and value [n, Hkv, Dv] of the step, followed by the padded rows."""
        rows = [self.queries]
        for dense, scale in zip((self.keys, self.values), self.case.part_scales, strict=True):
            kept = map(self.new_keys, range(len(dense)))
            rows.append(
                [each[k.start : k.stop].to(self.case.dtype) * scale for each, k in zip(dense, kept, strict=True)]
            )
        shapes = [
            (self.case.num_heads, self.case.head_size),
            (self.case.num_kv_heads, self.case.head_size),
            (self.case.num_kv_heads, self.layer.head_size_v),
        ]
        query, key, value = (self._padded(part, shape) for part, shape in zip(rows, shapes, strict=True))
        return query, key, value

    def _padded(self, rows: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        empty = torch.empty(0, *shape, dtype=self.case.dtype)
        pad = torch.full((self.case.padding, *shape), self._garbage("padding"), dtype=self.case.dtype)
        return torch.cat([empty, *rows, pad]).to(self.device)

    def inputs(self) -> dict[str, Any]:
        """Return further arguments of `write` and `forward`, none for a layer without inputs of its own."""
        return {}

    # A step and its expected result

    def run(
        self, backend: Any, writes_cache: bool = False, num_threads: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one step: plan, write, forward.

        Args:
            backend: the built backend.
            writes_cache: True if forward stores the new tokens. `write` is not called then.
            num_threads: threads of torch during the calls.

        Returns:
            out [num_tokens, H, Dv] and the LSE [H, num_tokens] or None, without padding.

        Raises:
            Failed: if an input or a foreign part of a buffer was changed, or a padded row is not finite.
        """
        with threads(num_threads):
            plan = backend.plan(self.batch)
        return self.step(backend, plan, writes_cache, num_threads)

    @threads(1)
    def step(
        self, backend: Any, plan: Any, writes_cache: bool = False, num_threads: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `write` and `forward` with an existing plan (see `run`)."""
        case = self.case
        query, key, value = sliced(*self.new_tokens()) if case.merged else self.new_tokens()
        inputs = {"query": query, "key": key, "value": value, "sinks": self.sinks} | {
            name: getattr(self.batch, name)
            for name in ("block_table", "slot_mapping", "seq_lens", "query_start_loc", "positions")
        }
        more = self.inputs()
        inputs |= more.get("inputs", {})
        expected = self.written()
        before = {name: bits(tensor) for name, tensor in inputs.items() if tensor is not None}
        shape = (query.shape[0] + 2 * GUARD_ROWS, case.num_heads, self.layer.head_size_v)
        guarded = torch.full(shape, SENTINEL, dtype=case.dtype, device=self.device)
        out = guarded[GUARD_ROWS:-GUARD_ROWS]
        with threads(num_threads):
            if not writes_cache:
                backend.write(self.layer, key, value, self.cache, plan, **more)
                self._expect_written(expected, "write")
            lse = backend.forward(self.layer, query, key, value, self.cache, plan, out, self.sinks, **more)
        for name, bytes_before in before.items():
            tensor = inputs[name]
            if tensor is not None and not torch.equal(bytes_before, bits(tensor)):
                raise Failed(f"the input {name} was changed by the backend; inputs are read only")
        self._expect_written(expected, "forward")
        guards = torch.cat([guarded[:GUARD_ROWS], guarded[-GUARD_ROWS:]])
        if not bool((guards == SENTINEL).all()):
            raise Failed("forward wrote before the first or after the last row of out")
        tokens = self.batch.num_tokens
        if not bool(torch.isfinite(out[tokens:]).all()):
            raise Failed(f"padded rows of out, from {tokens} on, are not finite")
        return out[:tokens], None if lse is None else lse[:, :tokens]

    def written(self) -> list[torch.Tensor] | None:
        """Return the bytes of the cache after the new tokens are stored. None for encoders, which need no cache."""
        if self.case.attention_type == "encoder_only":
            return None
        before = [buffer.clone() for buffer in self.buffers]
        slots = self.batch.slot_mapping.cpu()
        start = 0
        for request in range(len(self.case.requests)):
            new = self.new_keys(request)
            stop = start + len(new)
            self._put(request, new, slots[start:stop])
            start = stop
        expected = self.cache_bits()
        for buffer, old in zip(self.buffers, before, strict=True):
            raw(buffer).copy_(raw(old))
        self.expect_foreign_blocks(expected, slots)
        return expected

    def expect_foreign_blocks(self, written: list[torch.Tensor], slots: torch.Tensor) -> None:
        """Check what `put` made of the cache, where it is the work of a plugin and not of this world."""

    def _expect_written(self, expected: list[torch.Tensor] | None, after: str) -> None:
        if expected is not None:
            self.expect_cache(
                expected, f"after {after} the cache must hold the new tokens at their slots, all else kept"
            )

    def cache_bits(self) -> list[torch.Tensor]:
        """Return the bytes of the whole cache, gaps included."""
        return [bits(buffer) for buffer in self.buffers]

    def expect_cache(self, expected: list[torch.Tensor], message: str) -> None:
        """Raise `Failed` with the first place where the cache differs from `expected`, a result of `cache_bits`."""
        for before, after in zip(expected, self.cache_bits(), strict=True):
            if not torch.equal(before, after):
                block = int((before != after).any(1).nonzero()[0])
                raise Failed(f"{message}: block {block} of {self.num_blocks} differs{self._owner(block)}")

    def _owner(self, block: int) -> str:
        if block == NULL_BLOCK:
            return " (the null block)"
        for request, own in enumerate(self.owned):
            if block in own:
                return f" (block {own.index(block)} of request {request})"
        return " (it belongs to no request)"

    def seen(self, request: int) -> torch.Tensor | None:
        """Return the keys that a request's query tokens see, [q, L] bool. None for what masks of the layer say."""
        return self.case.seen(request)

    @cached_property
    def dense(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each request that its queries attend to."""
        if self.case.kv_scales is not None:
            scale_k, scale_v = self.case.part_scales
            pairs = zip(self.keys, self.values, strict=True)
            return [(k.to(self.case.dtype) * scale_k, v.to(self.case.dtype) * scale_v) for k, v in pairs]
        if self.case.attention_type != "encoder_only":
            return list(zip(self.keys, self.values, strict=True))
        both = zip(self.keys, self.values, self.case.requests, strict=True)
        return [(k[len(k) - q :], v[len(v) - q :]) for k, v, (q, _) in both]

    def answers(self, dtype: torch.dtype = torch.float64) -> list[oracle.Answer]:
        """Return the expected result of each request, computed in `dtype` on the host."""
        case = self.case
        sinks = None if self.sinks is None else self.sinks.cpu()
        return [
            oracle.attention(
                query,
                keys,
                values,
                scale=self.layer.scale,
                window=case.window,
                soft_cap=case.soft_cap,
                sinks=sinks,
                slopes=case.alibi_slopes,
                biases=case.biases,
                causal=case.causal,
                dtype=dtype,
                seen=self.seen(request),
                positions=torch.tensor(case.positions(request)),
            )
            for request, (query, (keys, values)) in enumerate(zip(self.queries, self.dense, strict=True))
        ]

    @threads(1)
    def check(
        self,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        run: Run | None = None,
        *,
        base: str = "e",
        rule: oracle.Tolerance = oracle.DEFAULT,
    ) -> None:
        """Compare with the oracle.

        Args:
            out, lse: as `run` returns them.
            run: records the worst error.
            base: base of the LSE.
            rule: the constants of the tolerance.

        Raises:
            Failed: with request, token and head of the first wrong output.
        """
        got, got_lse = out.cpu().double(), None if lse is None else lse.cpu().double()
        if got_lse is not None and base == "2":
            got_lse = got_lse * np.log(2.0)
        measure = run.measure if run is not None else _measure
        coarse, start = self.case.coarse_dtype, 0
        for request, (exact, eager) in enumerate(zip(self.answers(), self.answers(coarse), strict=True)):
            stop = start + len(exact.out)
            if stop > start:
                allowed = oracle.tolerance(exact, eager, self.dense[request][1], coarse, rule)
                off = (got[start:stop] - exact.out).abs()
                error, where = float(off.max()), f"output of request {request}"
                if not error <= allowed.out:
                    where = self._where(request, off.amax(2), got[start:stop], exact.out)
                measure(error=error, allowed=allowed.out, baseline=allowed.baseline, what=where)
                if got_lse is not None:
                    off = (got_lse[:, start:stop] - exact.lse).abs()
                    measure(error=float(off.max()), allowed=allowed.lse, what=f"LSE of request {request}")
            start = stop

    def _where(self, request: int, off: torch.Tensor, got: torch.Tensor, exact: torch.Tensor) -> str:
        """Return a description of the worst output. `off` is [q, H]."""
        query_len, length = self.case.requests[request]
        bad = int(torch.nan_to_num(off, torch.inf).argmax())
        token, head = divmod(bad, off.shape[1])
        position = length - query_len + token
        return (
            f"output of request {request} ({query_len} query tokens, {length} in all) at position {position}, "
            f"head {head} (block {position // self.case.block_size}): got {_few(got[token, head])}, "
            f"expected {_few(exact[token, head])}{self.notes.get(request, '')}"
        )

    def changed(self, **changes: Any) -> World:
        """Return a new world for a changed case."""
        return self.like(evolve(self.case, **changes))

    def like(self, case: Case) -> World:
        """Return a new world of another case, with the same kind of cache."""
        return type(self)(case, str(self.device))


def _measure(*, error: float, allowed: float, baseline: float | None = None, what: str = "output") -> None:
    if not error <= allowed:
        raise Failed(f"{what}: error {error:.3g}, allowed {allowed:.3g}")


def _few(values: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values[:3].tolist()) + ", ...]"


def sliced(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same query, key and value as parts of wider tensors, as merged projections and views by head are.

    Queries [n, H, D] lie beside other columns, keys are a view of [Hkv, n, D], and values of each head have a gap
    behind them. What lies between is NaN.
    """
    n, heads, size = query.shape
    wide = query.new_full((n, heads * size + 24), torch.nan)
    beside = wide[:, 16 : 16 + heads * size].unflatten(1, (heads, size))
    by_head = key.new_full((key.shape[1] + 1, n + 3, key.shape[2]), torch.nan)[1:, 2 : 2 + n].transpose(0, 1)
    with_gaps = value.new_full((n, value.shape[1], value.shape[2] + 8), torch.nan)[..., : value.shape[2]]
    return beside.copy_(query), by_head.copy_(key), with_gaps.copy_(value)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers of equal width, so that eight-bit floats can be indexed and NaN equals NaN."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's bytes, so that NaN equals NaN."""
    return raw(tensor.contiguous()).clone()


def constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return [1] of one value, with the dtype and device of another tensor."""
    return torch.tensor([value]).to(like.dtype).to(like.device)


def fill(view: torch.Tensor, blocks: torch.Tensor, value: float) -> None:
    """Set whole blocks of a cache view to a value."""
    raw(view)[blocks] = raw(constant(value, view))
