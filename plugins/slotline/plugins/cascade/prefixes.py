"""Cascade attention: finds the prefixes that a step's requests share, from the blocks of their tables.

Requests are the leaves of a tree: a node is a set of requests whose tables begin with the same blocks, and its depth is
the number of these blocks. Of a node's blocks behind those of a node around it, one reading serves all of its requests.
Segments are chosen so that the most readings of blocks are saved, as far as the backends say that they pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from attrs import frozen

from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.plugins.cascade.step_prefixes import CommonPrefixes, GroupedPrefixes, Segment
from slotline.registry.contracts import CascadeBackend
from slotline.registry.contracts.prefix_groups import MAX_LEVELS, MAX_SEGMENTS

Int = npt.NDArray[np.int64]
LEVELS = {"one": 0, "groups": 1, "levels": MAX_LEVELS}
"""Levels of segments by what a backend declares, 0 for one of all requests alone."""
MAX_NESTED = 8
"""Nodes around a node at most. Those further inside, as of prompts that each share a block more, are not looked at."""


@frozen(eq=False)
class CascadeGroup:
    """A cache group whose layers see all keys, the backends that serve it, and the levels that they all know."""

    cache: CacheGroup
    kernel_block_size: int
    backends: tuple[CascadeBackend, ...]
    levels: int = 0


class Node(NamedTuple):
    """Requests `first` .. `end` - 1 in sorted order, whose tables begin with the same `depth` blocks."""

    first: int
    end: int
    depth: int
    children: tuple[Node, ...]


class Choice(NamedTuple):
    """Segments as (node, first block), those of a level before those behind them, and the readings that they save."""

    saved: int
    taken: tuple[tuple[Node, int, int], ...]  # node, first block, level


class Cascade:
    """Finder of a step's prefixes. Asks the backends if serving a prefix separately pays. Implements `PrefixFinder`.

    Args:
        groups: by cache group. None for groups without cascade attention.
        rows: the request table.
    """

    def __init__(self, groups: Sequence[CascadeGroup | None], rows: RequestTable) -> None:
        self._groups = tuple(groups)
        self._rows = rows
        self._levels = max((group.levels for group in groups if group is not None), default=0)
        self._last: tuple[Int, int, CommonPrefixes | GroupedPrefixes | None] | None = None

    def of_step(self, schedule: SchedulerOutput) -> CommonPrefixes | GroupedPrefixes | None:
        """Return the prefixes to serve separately in a step, None for none.

        Requests that are decoded again have the prefixes of the step before, unless blocks were replaced since.
        """
        merged, last = sum(group.cache.num_replaced for group in self._groups if group is not None), self._last
        if last is not None and schedule.rows is last[0] and merged == last[1]:  # repeated steps pass the same array
            return last[2]
        computed = schedule.num_computed - np.maximum(self._rows.num_pending[schedule.rows] - 1, 0)  # at least
        found = self.prefixes(schedule.rows, computed, schedule.num_scheduled)
        self._last = schedule.rows, merged, found
        return found

    def prefixes(self, rows: Int, num_computed: Int, num_scheduled: Int) -> CommonPrefixes | GroupedPrefixes | None:
        """Return the prefixes of requests in `rows` [n], that have `num_computed` [n] tokens before the step."""
        chosen = [
            [] if group is None else self._segments(group, rows, num_computed, num_scheduled) for group in self._groups
        ]
        if not any(chosen):
            return None
        if all(len(own) < 2 and all(len(one.requests) == len(rows) for one in own) for own in chosen):
            return CommonPrefixes(tuple(own[0].end if own else 0 for own in chosen))
        known = tuple(
            own if group is not None and group.levels else None for own, group in zip(chosen, self._groups, strict=True)
        )
        if not any(known):
            return None
        starts = np.concatenate([[0], np.cumsum(num_scheduled)])
        return GroupedPrefixes(
            segments=known,
            starts=starts,
            num_requests=len(rows),
            num_tokens=int(starts[-1]),
            max_levels=self._levels,
        )

    def longest(self, query_lens: Int, seq_len: int, kind: int) -> CommonPrefixes | GroupedPrefixes | None:
        """Return the longest prefixes of a batch of requests of equal length, None if the backends would decline.

        Groups must pay for half of the requests: else there would be one for all.
        """
        before, requests = seq_len - int(query_lens.max()), np.arange(len(query_lens))
        asked = query_lens if kind == 1 else query_lens[: max(2, len(query_lens) // 2)]
        lens = np.full(len(asked), seq_len)
        lengths = tuple(
            before // group.kernel_block_size * group.kernel_block_size
            if group is not None
            and before >= group.kernel_block_size
            and (kind == 1 or group.levels)
            and _pays(group, before // group.kernel_block_size * group.kernel_block_size, asked, lens)
            else 0
            for group in self._groups
        )
        if not any(lengths):
            return None
        if kind == 1:
            return CommonPrefixes(lengths)
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        return GroupedPrefixes(
            segments=tuple(
                None if group is None or not group.levels else [Segment(requests, 0, length, 0)] if length else []
                for group, length in zip(self._groups, lengths, strict=True)
            ),
            starts=starts,
            num_requests=len(query_lens),
            num_tokens=int(starts[-1]),
            max_levels=self._levels,
        )

    def _segments(self, group: CascadeGroup, rows: Int, num_computed: Int, num_scheduled: Int) -> list[Segment]:
        """Return the segments to serve separately in a cache group, those of level 0 first."""
        size, blocks = group.kernel_block_size, num_computed // group.kernel_block_size
        order, roots = shared_prefixes(group.cache.table, rows, blocks)
        if not roots:
            return []
        seq_lens = num_computed + num_scheduled

        def pays(node: Node, first: int) -> bool:
            own = order[node.first : node.end]
            return _pays(group, (node.depth - first) * size, num_scheduled[own], seq_lens[own])

        if not group.levels:
            whole = roots[0]
            alone = whole.end - whole.first == len(rows) and pays(whole, 0)
            return [Segment(np.sort(order), 0, whole.depth * size, 0)] if alone else []
        for levels in range(group.levels, 0, -1):
            taken = choose(roots, range(levels), pays).taken
            if len(taken) <= MAX_SEGMENTS:
                break
        else:  # those that save the most
            most_first = sorted(taken, key=lambda one: (one[0].first - one[0].end) * one[0].depth)
            taken = tuple(most_first[:MAX_SEGMENTS])
        return [
            Segment(np.sort(order[node.first : node.end]), first * size, node.depth * size, level)
            for node, first, level in sorted(taken, key=lambda one: one[2])
        ]


def shared_prefixes(table: npt.NDArray[np.int32], rows: Int, blocks: Int) -> tuple[Int, list[Node]]:
    """Return an order of a step's requests, and the roots of the trees of what they share at the start, in this order.

    Args:
        table: [max_requests, max_blocks], block ids by row.
        rows: [n], rows of the requests.
        blocks: [n], the blocks of each that may be shared.
    """
    order: Int = np.argsort(table[rows, 0], kind="stable")
    firsts = table[rows[order], 0]
    if len(rows) < 2 or not (firsts[1:] == firsts[:-1]).any():  # nothing is shared, as in most steps
        return order, []
    most = int(blocks.max())
    if most == 0:
        return order, []
    own = table[rows, :most]
    own = np.where(np.arange(most) < blocks[:, None], own, -1 - np.arange(len(rows), dtype=np.int32)[:, None])
    keys = np.ascontiguousarray(own).view(np.dtype((np.void, own.itemsize * most))).reshape(-1)
    order = np.argsort(keys, kind="stable")
    same = own[order[1:]] == own[order[:-1]]  # [n - 1, most]
    alike = np.where(same.all(1), most, same.argmin(1)).tolist()
    return order, list(_nodes(alike, 0, len(rows), 0))


def _nodes(alike: Sequence[int], first: int, end: int, depth: int, around: int = 0) -> tuple[Node, ...]:
    """Return the nodes of requests `first` .. `end` - 1 that share more than `depth` blocks with their neighbours.

    `alike` has the blocks that each request shares with the next one.
    """
    found, begin = list[Node](), first
    for at in range(first, end):
        if at == end - 1 or alike[at] <= depth:
            if at > begin:
                least = min(alike[begin:at])
                inside = _nodes(alike, begin, at + 1, least, around + 1) if around < MAX_NESTED else ()
                found.append(Node(begin, at + 1, least, inside))
            begin = at + 1
    return tuple(found)


def choose(nodes: Sequence[Node], levels: range, pays: Callable[[Node, int], bool], first: int = 0) -> Choice:
    """Return the segments of these levels that save most readings of blocks, from block `first` on.

    Args:
        pays: whether a node's blocks from one on are worth a segment.
    """
    best = [_of_node(node, levels, pays, first) for node in nodes] if levels else []
    return Choice(sum(one.saved for one in best), tuple(one for each in best for one in each.taken))


def _of_node(node: Node, levels: range, pays: Callable[[Node, int], bool], first: int) -> Choice:
    behind = choose(node.children, levels, pays, first)
    if not pays(node, first):
        return behind
    inner = choose(node.children, levels[1:], pays, node.depth)
    saved = (node.end - node.first - 1) * (node.depth - first) + inner.saved
    return Choice(saved, ((node, first, levels[0]), *inner.taken)) if saved > behind.saved else behind


def _pays(group: CascadeGroup, length: int, query_lens: Int, seq_lens: Int) -> bool:
    return length > 0 and all(backend.use_cascade(length, query_lens, seq_lens) for backend in group.backends)
