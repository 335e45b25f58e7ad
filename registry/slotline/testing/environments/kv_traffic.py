"""Small engine for a cache spec: requests share a pool of blocks, write tokens and read them back like attention.

Every token has a number that represents it and all tokens before it, so equal numbers mean equal prefixes. It is
written into each element of the token's key, its negative into the value. In other formats than ``plain`` it is written
into all tensors of the token, its remainder where they hold integers. Free blocks and the null block hold `POISON`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field

from slotline.registry.contracts import AttentionLayer, BlockHash, CacheTensors
from slotline.testing.check import Failed
from slotline.testing.environments.kv_spec import Group
from slotline.testing.oracles.kv_spec import oldest_visible

NULL_BLOCK = 0
POISON = -1.0e9
POISON_CODE = 127
"""The same for integers, which else hold remainders below it."""


@define(eq=False)
class Request:
    """Request with the numbers of all its future tokens, the number of computed tokens, and its block table."""

    name: str
    numbers: torch.Tensor
    computed: int = 0
    blocks: list[int] = field(factory=list)
    freed: int = 0

    @property
    def held(self) -> int:
        """Number of blocks in the table that are not the null block."""
        return sum(block != NULL_BLOCK for block in self.blocks)


@define(eq=False)
class Traffic:
    """Pool, memory and requests. The most recently freed block is reused first, so that stale reads show early."""

    group: Group
    num_blocks: int
    device: str
    caching: bool
    requests: list[Request] = field(init=False, factory=list)
    story: list[str] = field(init=False, factory=list)
    hits: int = field(init=False, default=0)
    caches: list[Any] = field(init=False)
    free: list[int] = field(init=False)
    references: dict[int, int] = field(init=False, factory=dict)
    block_of: dict[BlockHash, int] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))
        self.caches = []
        for layer in self.group.layers:
            size = self.num_blocks * self.group.spec.page_bytes(layer)
            raw = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self.caches.append(self.group.spec.bind(raw, layer, self.num_blocks))
        for block in range(self.num_blocks):
            self.poison(block)

    def admit(self, name: str, tokens: Sequence[int]) -> Request:
        """Add a request, which takes the cached blocks of its prefix."""
        request = Request(name, prefix_numbers(tokens).to(self.device))
        self.requests.append(request)
        if self.caching:
            hashes = self.hashes(request, (len(tokens) - 1) // self.group.block_size)
            found = self.group.spec.prefix_hit(hashes, self.block_of.get)
            for block in found:
                self.take(block)
            request.blocks, request.computed = list(found), len(found) * self.group.block_size
            self.hits += request.computed > 0
        self.story.append(
            f"{name} comes with {len(tokens)} tokens, {request.computed} of them cached: {request.blocks}"
        )
        return request

    def step(self, request: Request, count: int) -> bool:
        """Compute the next `count` tokens. Return False and do nothing if the pool has too few blocks."""
        count = min(count, len(request.numbers) - request.computed)
        after = request.computed + count
        missing = self.group.spec.blocks_needed(after) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            request.blocks.append(self.fresh_block())
        self.story.append(f"{request.name} computes {request.computed}..{after - 1}, blocks {request.blocks}")
        self.write(request, request.computed, after)
        self.read(request, request.computed, after)
        self.remember(request, request.computed, after)
        request.computed = after
        self.free_leading(request)
        return True

    def finish(self, request: Request) -> None:
        """Remove the request. Its blocks can be found until they are reused."""
        self.story.append(f"{request.name} leaves")
        self.requests.remove(request)
        for block in reversed(request.blocks):
            self.release(block)

    def free_leading(self, request: Request) -> None:
        """Free the blocks that are not read any more according to the spec."""
        last = self.group.spec.blocks_freeable(request.computed)
        if last > len(request.blocks):
            raise Failed(
                f"blocks_freeable({request.computed}) is {last}, the table has {len(request.blocks)} blocks; "
                f"{self.group.describe()}"
            )
        for index in range(request.freed, last):
            self.release(request.blocks[index])
            request.blocks[index] = NULL_BLOCK
        request.freed = max(request.freed, last)

    def places(self, request: Request, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return kernel block and offset of the positions first .. last - 1."""
        positions = torch.arange(first, last)
        size, ratio = self.group.context.kernel_block_size, self.group.ratio
        manager = torch.tensor(request.blocks)[positions // self.group.block_size]
        kernel = manager * ratio + positions % self.group.block_size // size
        return kernel.to(self.device), (positions % size).to(self.device)

    def write(self, request: Request, first: int, last: int) -> None:
        """Store the tokens' numbers in every layer."""
        numbers = request.numbers[first:last, None, None]
        where = self.places(request, first, last)
        for layer, cache in zip(self.group.layers, self.caches, strict=True):
            for _, view, sign, of_key in self.views(layer, cache):
                if not of_key:
                    view[where] = filled(sign * numbers, view)

    def read(self, request: Request, first: int, last: int) -> None:
        """Check the keys that the queries first .. last - 1 read, each layer through its own window.

        Raises:
            Failed: if anything but the request's own tokens is there.
        """
        for layer, cache in zip(self.group.layers, self.caches, strict=True):
            start = int(oldest_visible([layer], last)[first:].min())
            where = self.places(request, start, last)
            wanted = request.numbers[start:last, None, None]
            for name, view, sign, _ in self.views(layer, cache):
                wrong = (view[where] != filled(sign * wanted, view)).flatten(1).any(dim=1).nonzero()
                if len(wrong):
                    self.fail(request, start + int(wrong[0]), f"{layer.kv_kind} {layer.name}, {name}", first)

    def views(self, layer: AttentionLayer, cache: Any) -> list[tuple[str, torch.Tensor, int, bool]]:
        """Return name and view of each tensor of a token, its sign, and True for values that lie in the keys."""
        if isinstance(cache, CacheTensors):
            names = [tensor.name for tensor in self.group.spec.tensors(layer) if tensor.per == "token"]
            return [(name, _whole(cache[name]), 1, False) for name in names]
        return [("key", cache.key, 1, False), ("value", cache.value, 1 if layer.mla else -1, layer.mla)]

    def fail(self, request: Request, position: int, where: str, query: int) -> None:
        """Raise `Failed` with the place of a wrong read."""
        block = request.blocks[position // self.group.block_size]
        lost = "the null block" if block == NULL_BLOCK else f"block {block}, which holds something else"
        raise Failed(
            f"{where}: the query at {query} or behind it reads position {position} of {request.name} from {lost}; "
            f"{self.group.describe()}; what went before: {'; '.join(self.story[-10:])}"
        )

    def remember(self, request: Request, before: int, after: int) -> None:
        """Make full blocks findable."""
        if not self.caching:
            return
        size = self.group.block_size
        hashes = self.hashes(request, after // size)
        for index in range(before // size, after // size):
            if request.blocks[index] != NULL_BLOCK:
                self.block_of.setdefault(hashes[index], request.blocks[index])

    def hashes(self, request: Request, count: int) -> list[BlockHash]:
        """Return the chained hashes of the first `count` blocks.

        The number of a block's last token identifies its prefix.
        """
        ends = request.numbers[self.group.block_size - 1 :: self.group.block_size][:count]
        return [np.float32(number).tobytes() + b"block" for number in ends.tolist()]

    def fresh_block(self) -> int:
        """Return a free block, which loses its old content."""
        block = self.free.pop()
        for block_hash in [key for key, value in self.block_of.items() if value == block]:
            del self.block_of[block_hash]
        self.references[block] = 1
        self.poison(block)
        return block

    def take(self, block: int) -> None:
        """Add a reference to a block."""
        if block == NULL_BLOCK:
            return
        if not self.references.get(block):
            self.free.remove(block)
        self.references[block] = self.references.get(block, 0) + 1

    def release(self, block: int) -> None:
        """Drop a reference to a block."""
        if block == NULL_BLOCK:
            return
        self.references[block] -= 1
        if not self.references[block]:
            self.free.append(block)

    def poison(self, block: int) -> None:
        """Fill a block with `POISON`."""
        ratio = self.group.ratio
        for layer, cache in zip(self.group.layers, self.caches, strict=True):
            for _, view, *_ in self.views(layer, cache):
                poison = POISON if view.dtype.is_floating_point else POISON_CODE
                view[block * ratio : (block + 1) * ratio] = poison


def _whole(view: torch.Tensor) -> torch.Tensor:
    """Return eight-bit floats as bytes, which hold whole numbers and can be indexed on every device."""
    return view.view(torch.uint8) if view.dtype.itemsize == 1 and view.dtype.is_floating_point else view


def filled(numbers: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return numbers [n, 1, 1] as tokens of a view hold them, [n, *shape of a token]."""
    flat = numbers.view(-1, *[1] * (view.dim() - 2)).expand(-1, *view.shape[2:])
    return flat if view.dtype.is_floating_point else (flat % POISON_CODE).to(view.dtype)


def prefix_numbers(tokens: Sequence[int]) -> torch.Tensor:
    """Return [len(tokens)] float32: an integer below 2 ** 24 for each token and all before it."""
    numbers: list[Any] = []
    state = 0
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        numbers.append(state % 2**24 + 1)
    return torch.tensor(numbers, dtype=torch.float32)
