"""Requests that live for many steps over one pool of blocks, as an engine drives them.

Unlike a `World`, which fills the cache itself, a `Pool` lets the backend under test write every token. Blocks are
reused last in, first out, and refilled with NaN when they are freed, so that a stale block table, length or block is
read as NaN or as another request's tokens. After a rollback the rejected tokens stay in their slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, evolve

from slotline.testing.check import Run
from slotline.testing.environments.attention import (
    FIRST_BLOCK,
    NULL_BLOCK,
    POISON_BLOCK,
    Case,
    World,
    threads,
)


@define
class Request:
    """Request with its blocks, its number of tokens, and the tokens' tensors, [longest, heads, size] each."""

    blocks: list[int]
    length: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Pool:
    """Pool of blocks, its requests, and one backend for all of them.

    Args:
        case: layer and surroundings. Its requests are not used.
        backend: the built backend, None for no backend.
        num_blocks: blocks that requests may hold.
        longest: most tokens of a request.
        device: device of the cache.
        writes_cache: True if forward stores the new tokens.
        world: makes the world whose cache the pool has.
    """

    def __init__(
        self,
        case: Case,
        backend: Any,
        *,
        num_blocks: int = 96,
        longest: int = 192,
        device: str = "cpu",
        writes_cache: bool = False,
        world: Callable[[Case, str], World] = World,
    ) -> None:
        self.case, self.backend, self.longest = evolve(case, requests=(), spare_blocks=num_blocks), backend, longest
        self.home = world(self.case, device)
        self._generator = torch.Generator().manual_seed(case.seed + 1)
        order = torch.randperm(num_blocks, generator=self._generator) + FIRST_BLOCK
        self.free: list[int] = order.tolist()
        self.references = dict.fromkeys(self.free, 0)
        self.requests: dict[int, Request] = {}
        self.writes_cache = writes_cache
        self.steps: list[str] = []
        self._next = 0

    # Operations of an engine on requests

    def admit(self) -> int:
        """Add a request without tokens and return its number."""
        case, layer = self.case, self.home.layer
        shapes = [(case.num_heads, case.head_size), (case.num_kv_heads, case.head_size)]
        query, key = (self._random(self.longest, *shape) for shape in shapes)
        latent = key[..., : layer.head_size_v]
        value = latent if case.mla else self._random(self.longest, case.num_kv_heads, layer.head_size_v)
        return self._add(Request([], 0, query, key, value))

    def fork(self, number: int) -> int:
        """Add a second request with the same tokens so far, which shares all blocks. Later tokens differ."""
        old = self.requests[number]
        for block in old.blocks:
            self.references[block] += 1
        key = old.key.clone()
        value = key[..., : self.home.layer.head_size_v] if self.case.mla else old.value.clone()
        new = Request(list(old.blocks), old.length, old.query.clone(), key, value)
        self._redraw(new)
        return self._add(new)

    def roll_back(self, number: int, length: int) -> None:
        """Forget the tokens from `length` on. They stay in their slots, and unneeded blocks are freed."""
        request = self.requests[number]
        request.length = length
        while len(request.blocks) > self._blocks_for(length):
            self._release(request.blocks.pop())
        self._redraw(request)

    def finish(self, number: int) -> None:
        """Remove a request."""
        for block in reversed(self.requests.pop(number).blocks):
            self._release(block)

    @threads(1)
    def step(self, new_tokens: Mapping[int, int], run: Run | None = None) -> torch.Tensor:
        """Run one batch with new tokens of the given requests, in this order, and compare it with the oracle.

        Returns:
            out [num_tokens, H, Dv].

        Raises:
            Failed: if an output is wrong or a foreign slot was written.
        """
        for number, count in new_tokens.items():
            self._grow(number, count)
        world = Step(self, new_tokens)
        out, _ = world.run(self.backend, self.writes_cache)
        world.check(out, run=run)
        return out

    def room_for(self, number: int, count: int) -> bool:
        """Return True if a request can take `count` more tokens."""
        request = self.requests[number]
        needed = self._blocks_for(request.length + count) - len(request.blocks) + 1  # one for a copy on write
        return request.length + count <= self.longest and needed <= len(self.free)

    # Blocks

    def _add(self, request: Request) -> int:
        self._next += 1
        self.requests[self._next] = request
        return self._next

    def _grow(self, number: int, count: int) -> None:
        request, size = self.requests[number], self.case.block_size
        if count and request.length % size:
            last = request.length // size
            if self.references[request.blocks[last]] > 1:
                request.blocks[last] = self._copy(request.blocks[last])
        request.length += count
        while len(request.blocks) < self._blocks_for(request.length):
            request.blocks.append(self._take())

    def _take(self) -> int:
        block = self.free.pop()
        self.references[block] = 1
        if self.case.stale:
            size = self.case.block_size
            self.home.put_old_tokens(range(block * size, (block + 1) * size))
        return block

    def _copy(self, block: int) -> int:
        copy = self._take()
        self.home.copy_block(block, copy)
        self._release(block)
        return copy

    def _release(self, block: int) -> None:
        self.references[block] -= 1
        if not self.references[block]:
            self.free.append(block)
            self.home.spoil([block])

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.case.block_size)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.case.dtype).to(self.case.cache_dtype)

    def _redraw(self, request: Request) -> None:
        for tokens in (request.query, request.key, *(() if self.case.mla else (request.value,))):
            tokens[request.length :] = self._random(*tokens[request.length :].shape)


class Step(World):
    """Step of a pool, as a world. The cache is the pool's, and contains the backend's earlier writes."""

    def __init__(self, pool: Pool, new_tokens: Mapping[int, int]) -> None:
        chosen = [pool.requests[number] for number in new_tokens]
        counts = list(new_tokens.values())
        shapes = tuple((count, request.length) for count, request in zip(counts, chosen, strict=True))
        self.case, self.layer, self.device = evolve(pool.case, requests=shapes), pool.home.layer, pool.home.device
        self.notes = {}
        self.queries = [
            request.query[request.length - count : request.length].to(self.case.dtype)
            for count, request in zip(counts, chosen, strict=True)
        ]
        self.keys = [request.key[: request.length] for request in chosen]
        self.values = [request.value[: request.length] for request in chosen]
        self.sinks = pool.home.sinks
        self.num_blocks, self.buffers, self.cache = pool.home.num_blocks, pool.home.buffers, pool.home.cache
        self.owned = [request.blocks for request in chosen]
        width = max((len(own) for own in self.owned), default=0) + 2
        self.host_table = torch.full((len(chosen), width), POISON_BLOCK, dtype=torch.int32)
        for row, own in enumerate(self.owned):
            self.host_table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
            self.host_table[row, len(own)] = NULL_BLOCK
        self.block_table = self.host_table.to(self.device)
        self._home = pool.home
        self.batch = self.make_batch()

    def put(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, live: bool = True) -> None:
        """Put keys and values into the pool's cache."""
        self._home.put(slots, keys, values, live=live)

    def expect_foreign_blocks(self, written: list[torch.Tensor], slots: torch.Tensor) -> None:
        """Check the pool's cache."""
        self._home.expect_foreign_blocks(written, slots)
