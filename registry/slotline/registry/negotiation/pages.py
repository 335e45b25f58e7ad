"""Shared pool for cache groups with different page sizes: the size of each group's block, and the waste.

A block of the pool belongs to one group at a time and has the same number of bytes for all groups. Groups whose layers
need few bytes per token therefore get blocks of more tokens. The rest of a block is padding. Blocks of a group are
divided into kernel blocks at a fixed distance, so the bytes of a block are a multiple of each group's number of kernel
blocks.

Example: 10 full layers and 52 with a window of 1024, blocks of 16 tokens. A page of the full layers is 10/52 of a page
of the others. With 80 tokens it is 50/52, so 4 % of each of their blocks is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

from attrs import frozen

from slotline.registry.contracts.attention import AttentionLayer

ALIGNMENT = 16
"""Bytes; each kernel block of each layer begins at a multiple, so that kernels can load vectors."""

LARGEST_SHARED_BLOCK = 512
"""Tokens; larger blocks would find shorter prefixes and lose more at a request's end than padding does."""

TOLERANCE = 0.03
"""Blocks that need so much more memory than the best are as good as those, if they are smaller."""


@frozen(kw_only=True)
class GroupPage:
    """Block of a cache group.

    Attributes:
        name: name of the cache group.
        block_size, kernel_block_size: tokens.
        page_bytes: bytes of a block that the group's layers use, alignment included.
        blocks: most blocks held at a time by a decoding request of the longest length.
        optimal_bytes: bytes of the keys and values that the next token of that request reads.
    """

    name: str
    block_size: int
    kernel_block_size: int
    page_bytes: int
    blocks: int
    optimal_bytes: int

    @property
    def ratio(self) -> int:
        """Number of kernel blocks in a block."""
        return self.block_size // self.kernel_block_size


@frozen(kw_only=True)
class PoolPlan:
    """Division of the pool's memory into blocks.

    Attributes:
        block_bytes: bytes of one block.
        shared: True if a block's bytes can be used by any group. False if a block takes memory in each group.
        max_model_len: tokens of the request that the numbers refer to.
        groups: in the plan's order.
    """

    block_bytes: int
    shared: bool
    max_model_len: int
    groups: tuple[GroupPage, ...]

    @property
    def bytes_per_request(self) -> int:
        """Most bytes of a decoding request of `max_model_len` tokens."""
        return sum(group.blocks for group in self.groups) * self.block_bytes

    @property
    def optimal_bytes_per_request(self) -> int:
        """Most bytes of the same request without blocks and padding, for keys and values that are still read."""
        return sum(group.optimal_bytes for group in self.groups)

    def padding(self, group: GroupPage) -> float:
        """Return the fraction of a block of the group that none of its layers uses."""
        return 1 - group.page_bytes / self.block_bytes

    def group(self, name: str) -> GroupPage:
        """Return the group of that name. Raises KeyError if there is none."""
        return {group.name: group for group in self.groups}[name]

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {
            "block_bytes": self.block_bytes,
            "shared": self.shared,
            "max_model_len": self.max_model_len,
            "bytes_per_request": self.bytes_per_request,
            "optimal_bytes_per_request": self.optimal_bytes_per_request,
            "groups": [
                {
                    "name": group.name,
                    "block_size": group.block_size,
                    "page_bytes": group.page_bytes,
                    "padding": round(self.padding(group), 4),
                    "blocks_per_request": group.blocks,
                }
                for group in self.groups
            ],
        }

    def lines(self) -> list[str]:
        """Return the numbers in words."""
        need, best = self.bytes_per_request, self.optimal_bytes_per_request
        text = (
            f"{self.block_bytes} bytes a block; a request of {self.max_model_len} tokens holds "
            f"{' + '.join(f'{group.blocks} {group.name}' for group in self.groups)} blocks at most, {in_units(need)}: "
            f"{in_percent(need / best - 1)} above the {in_units(best)} that are read, or {2**30 / need:.1f} requests "
            f"per GiB where {2**30 / best:.1f} is the optimum"
        )
        return [text, *(text for group in self.groups if (text := self._waste(group)))]

    def _waste(self, group: GroupPage) -> str:
        if group.page_bytes == self.block_bytes:
            return ""
        percent, page = in_percent(self.padding(group)), f"{group.block_size} tokens take {group.page_bytes} bytes"
        if not self.shared:
            return f"{percent} unused in blocks of group {group.name}, whose {page}: groups do not share memory"
        largest = max(self.groups, key=lambda other: other.page_bytes)
        if largest is group:
            why = f"the pool's blocks are {self.block_bytes} bytes, so that they divide evenly in each group"
        else:
            why = f"{largest.block_size} of group {largest.name} take {largest.page_bytes}"
        return f"{percent} padding in group {group.name} because its {page} and {why}"


def optimal_bytes(layer: AttentionLayer, page_bytes: int, block_size: int, max_model_len: int) -> int:
    """Return the bytes that the token at position `max_model_len` - 1 reads in one layer, its own key included."""
    reach = min(max_model_len, layer.window or max_model_len, layer.chunk or max_model_len)
    return -(-page_bytes * reach // block_size)


def share_pages(offers: Sequence[Sequence[GroupPage]], max_model_len: int) -> PoolPlan:
    """Choose each group's block so that requests need the least memory, or nearly the least with smaller blocks.

    For each possible size of a pool block, each group takes the block that fits and needs the fewest blocks. All
    combinations that could be best are therefore tried.

    Args:
        offers: for each group the blocks that its spec accepts.
        max_model_len: tokens of the longest request.
    """
    sizes = sorted({page.page_bytes for group in offers for page in group})
    smallest = max(min(page.page_bytes for page in group) for group in offers)
    plans = [_fit(offers, size, max_model_len) for size in sizes if size >= smallest]
    best = min(plan.bytes_per_request for plan in plans)
    good = [plan for plan in plans if plan.bytes_per_request <= best * (1 + TOLERANCE)]
    return min(good, key=_preference)


def pages_apart(pages: Sequence[GroupPage], max_model_len: int) -> PoolPlan:
    """Return a plan with separate memory for each group: a block takes its page in every group."""
    size = sum(page.page_bytes for page in pages)
    return PoolPlan(block_bytes=size, shared=len(pages) == 1, max_model_len=max_model_len, groups=tuple(pages))


def _fit(offers: Sequence[Sequence[GroupPage]], size: int, max_model_len: int) -> PoolPlan:
    best: Callable[[GroupPage], tuple[int, int]] = lambda page: (page.blocks, page.block_size)  # noqa: E731
    chosen = tuple(min((page for page in group if page.page_bytes <= size), key=best) for group in offers)
    unit = lcm(*(page.ratio for page in chosen)) * ALIGNMENT
    return PoolPlan(block_bytes=-(-size // unit) * unit, shared=True, max_model_len=max_model_len, groups=chosen)


def _preference(plan: PoolPlan) -> tuple[int, int, int]:
    """Return the sort key of a plan.

    Prefixes are found in steps of the blocks' least common multiple, so it comes first.
    """
    sizes = [group.block_size for group in plan.groups]
    return lcm(*sizes), sum(sizes), plan.bytes_per_request


def in_percent(share: float) -> str:
    """Return a fraction in percent."""
    return f"{100 * share:.1f} %"


def in_units(count: int) -> str:
    """Return a number of bytes with a unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
