"""Prefixes of groups of requests, at one level and two: found in tables, chosen well, served for equal texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import random_prompts, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from slotline.builder.freed_tokens import FreedTokens, FreeingGroup
from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.plugins.cascade.prefixes import Cascade, CascadeGroup
from slotline.plugins.cascade.step_prefixes import CommonPrefixes, GroupedPrefixes, Segment
from slotline.registry.contracts.prefix_groups import MAX_LEVELS, MAX_SEGMENTS, PrefixGroups, most_packed

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4


class Table:
    """The part of a cache group that is read."""

    def __init__(self, blocks: Sequence[Sequence[int]]) -> None:
        self.table = np.array(blocks, np.int32)
        self.num_replaced = 0


class Takes:
    """A backend that serves prefixes of so many tokens at least."""

    def __init__(self, least: int = 1) -> None:
        self.least, self.asked = least, 0

    def use_cascade(self, length: int, query_lens: Any, seq_lens: Any) -> bool:
        assert len(query_lens) == len(seq_lens) > 1
        assert (seq_lens - query_lens >= length).all()
        self.asked += 1
        return length >= self.least


def finder(table: Table, levels: int, least: int = 1, size: int = BLOCK) -> Cascade:
    group = CascadeGroup(table, size, (Takes(least),), levels)  # type: ignore[arg-type]
    return Cascade([group], RequestTable(len(table.table), 64))


def found_in(blocks: Sequence[Sequence[int]], levels: int, least: int = 1) -> list[tuple[list[int], int, int, int]]:
    """Segments as (requests, first block, block after the last, level), all blocks being computed."""
    table = Table(blocks)
    rows = np.arange(len(blocks))
    computed = np.full(len(rows), BLOCK * table.table.shape[1])
    made = finder(table, levels, BLOCK * least).prefixes(rows, computed, np.ones_like(rows))
    if made is None:
        return []
    if isinstance(made, CommonPrefixes):
        return [(rows.tolist(), 0, made.lengths[0] // BLOCK, 0)]
    assert made.segments[0] is not None
    return [(one.requests.tolist(), one.first // BLOCK, one.end // BLOCK, one.level) for one in made.segments[0]]


TWO_DOCUMENTS = [[1, 2, 3, 10], [1, 2, 3, 11], [1, 5, 6, 12], [1, 5, 6, 13], [1, 5, 6, 14], [9, 9, 9, 15]]


def test_groups_with_prefixes_of_their_own_and_levels_are_found() -> None:
    assert found_in(TWO_DOCUMENTS, 2) == [([0, 1, 2, 3, 4], 0, 1, 0), ([0, 1], 1, 3, 1), ([2, 3, 4], 1, 3, 1)]
    assert found_in(TWO_DOCUMENTS, 1) == [([0, 1], 0, 3, 0), ([2, 3, 4], 0, 3, 0)]
    assert found_in(TWO_DOCUMENTS, 0) == []
    assert found_in(TWO_DOCUMENTS[:5], 0) == [([0, 1, 2, 3, 4], 0, 1, 0)]


def test_a_segment_that_does_not_pay_is_part_of_the_one_behind_it_or_of_nothing() -> None:
    assert found_in(TWO_DOCUMENTS, 2, least=2) == [([0, 1], 0, 3, 0), ([2, 3, 4], 0, 3, 0)]
    assert found_in(TWO_DOCUMENTS, 2, least=4) == []
    deep = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5, 4]]
    assert found_in(deep, 2, least=2) == [([0, 1, 2], 0, 2, 0)]


def saved(segments: Sequence[tuple[list[int], int, int, int]]) -> int:
    """The readings of blocks that segments save."""
    return sum((len(requests) - 1) * (end - first) for requests, first, end, _ in segments)


def best(blocks: Sequence[tuple[int, ...]], levels: int, first: int = 0) -> int:
    """The most readings that segments of requests with equal blocks before `first` can save, by trying all."""
    if levels == 0 or len(blocks) < 2:
        return 0
    total = 0
    for lead in {row[first] for row in blocks if len(row) > first}:
        group = [row for row in blocks if len(row) > first and row[first] == lead]
        most = 0
        for end in range(first + 1, len(lead_of(group)) + 1):
            parts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
            for row in group:
                parts.setdefault(row[:end], []).append(row)
            most = max(most, sum((len(p) - 1) * (end - first) + best(p, levels - 1, end) for p in parts.values()))
        total += max(most, mixed(group, levels, first))
    return total


def lead_of(group: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return max(group, key=len)


def mixed(group: Sequence[tuple[int, ...]], levels: int, first: int) -> int:
    """Segments of unequal ends in one group: whole shared part at once, or each part behind it for itself."""
    depth = first
    while len({row[: depth + 1] for row in group}) == 1 and len(group[0]) > depth:
        depth += 1
    whole = (len(group) - 1) * (depth - first) + best(group, levels - 1, depth)
    parts: dict[int, list[tuple[int, ...]]] = {}
    for row in group:
        if len(row) > depth:
            parts.setdefault(row[depth], []).append(row)
    apart = sum(mixed(part, levels, first) for part in parts.values() if len(part) > 1)
    return max(whole, apart)


@given(
    blocks=st.lists(st.lists(st.integers(1, 2), min_size=4, max_size=4), min_size=2, max_size=6),
    levels=st.integers(1, MAX_LEVELS),
)
def test_the_segments_save_as_many_readings_as_any(blocks: list[list[int]], levels: int) -> None:
    segments = found_in(blocks, levels)
    assert saved(segments) == mixed_or_best([tuple(row) for row in blocks], levels)
    for requests, first, end, level in segments:
        shared = {tuple(blocks[request][:end]) for request in requests}
        assert len(shared) == 1
        outer = [one for one in segments if one[3] == level - 1 and set(requests) <= set(one[0])]
        assert first == 0 if level == 0 else [one[2] for one in outer] == [first]
    for level in range(MAX_LEVELS):
        members = [request for requests, _, _, at in segments if at == level for request in requests]
        assert len(members) == len(set(members))


def mixed_or_best(blocks: Sequence[tuple[int, ...]], levels: int) -> int:
    parts: dict[int, list[tuple[int, ...]]] = {}
    for row in blocks:
        parts.setdefault(row[0], []).append(row)
    return sum(max(mixed(p, levels, 0), best(p, levels)) for p in parts.values() if len(p) > 1)


def test_what_is_not_computed_yet_is_not_shared() -> None:
    rows, computed = np.arange(3), np.array([12, 7, 12])
    made = finder(Table([[1, 2, 3], [1, 2, 3], [1, 2, 3]]), 2).prefixes(rows, computed, np.array([1, 5, 1]))
    assert isinstance(made, GroupedPrefixes)
    assert made.segments[0] is not None
    assert [(s.requests.tolist(), s.first, s.end) for s in made.segments[0]] == [([0, 1, 2], 0, 4), ([0, 2], 4, 12)]


def test_a_repeated_step_keeps_its_prefixes_until_blocks_are_merged() -> None:
    table = Table(TWO_DOCUMENTS)
    cascade, rows = finder(table, 2), np.arange(6)
    ones = np.ones_like(rows)
    step = SchedulerOutput(rows=rows, num_scheduled=ones, num_computed=16 * ones, num_tokens=6, num_decodes=6)
    first = cascade.of_step(step)
    assert cascade.of_step(step) is first is not None
    table.num_replaced += 1
    assert cascade.of_step(step) is not first


class FourTokens:
    """A spec of blocks of four tokens."""

    def blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK)

    def blocks_freeable(self, num_tokens: int) -> int:
        return max(0, num_tokens - 8) // BLOCK


def test_cache_groups_count_the_changes_after_which_prefixes_are_looked_for_again() -> None:
    group = FreeingGroup(FreedTokens(np.zeros(3, np.int64)), 0, FourTokens(), BLOCK, BLOCK, 2, 32)
    group.extend(1, [5, 6, 7])
    assert group.num_replaced == 0
    group.merge(1, 2, 9)
    assert (group.num_replaced, group.blocks[1], group.table[1, :3].tolist()) == (1, [5, 6, 9], [5, 6, 9])
    group.replace(1, [8, 4])
    assert group.num_replaced == 2
    group.free_leading(1, 12)
    assert group.num_replaced == 3


def test_no_more_segments_than_a_batch_has_room_for() -> None:
    blocks = [[1 + i // 2, 100 + i // 2, 200 + i] for i in range(4 * MAX_SEGMENTS)]
    blocks[6] = blocks[7] = [9, 8, 7]  # three blocks: one of those that save the most
    found = found_in(blocks, 2)
    assert len(found) == MAX_SEGMENTS
    assert ([6, 7], 0, 3, 0) in found


def groups_of(made: GroupedPrefixes) -> PrefixGroups:
    groups: PrefixGroups = made.fields(0, torch.from_numpy(made.packed()))["prefix_groups"]
    return groups


def test_segments_name_their_query_tokens_and_a_captured_shape_has_room_for_more() -> None:
    made = GroupedPrefixes(
        segments=([Segment(np.array([0, 2]), 0, 8, 0), Segment(np.array([2, 3]), 8, 12, 1)],),
        starts=np.array([0, 1, 3, 4, 7]),
        num_requests=4,
        num_tokens=7,
    )
    groups = groups_of(made)
    assert (groups.levels, groups.segments.tolist()) == (2, [[0, 0, 8, 0], [2, 8, 12, 1]])
    assert groups.starts.tolist() == [0, 2, 6]
    assert groups.tokens.tolist()[:6] == [0, 3, 3, 4, 5, 6]
    assert groups.own.tolist() == [8, 0, 12, 12]
    assert groups.depths.tolist() == [1, 0, 0, 2, 2, 2, 2]
    padded = made.padded(8, 16)
    wide = groups_of(padded)
    assert (wide.segments.shape, wide.own.shape, wide.depths.shape) == ((MAX_SEGMENTS, 4), (8,), (16,))
    assert wide.starts.tolist() == [0, 2, *[6] * (MAX_SEGMENTS - 1)]
    assert wide.tokens.tolist()[:6] == groups.tokens.tolist()[:6]
    assert (wide.own[4:] == 0).all()
    assert most_packed(8, 16) - 16 <= len(padded.packed()) <= most_packed(8, 16)
    for groups in (groups_of(made), wide):  # kernels compiled for aligned tensors serve them all
        at = [getattr(groups, name).storage_offset() for name in ("segments", "starts", "tokens", "own", "depths")]
        assert all(offset % 4 == 0 for offset in at)


def test_a_captured_shape_has_the_same_arrays_where_a_cache_group_shares_nothing() -> None:
    pair = [Segment(np.array([0, 1]), 0, 8, 0)]
    both, one = (
        GroupedPrefixes(segments=(None, pair, own), starts=np.arange(3), num_requests=2, num_tokens=2)
        for own in (pair, [])
    )
    assert "prefix_groups" not in one.fields(2, torch.from_numpy(one.packed()))
    wide = one.padded(2, 2)
    assert len(both.padded(2, 2).packed()) == len(wide.packed())
    groups = wide.fields(2, torch.from_numpy(wide.packed()))["prefix_groups"]
    assert (groups.own.tolist(), groups.depths.tolist(), groups.starts.unique().tolist()) == ([0, 0], [0, 0], [0])
    assert wide.fields(0, torch.from_numpy(wide.packed())) == {}


SYSTEM, *DOCUMENTS = random_prompts([9, 12, 10, 8], seed=21)
PROMPTS = [SYSTEM + DOCUMENTS[i % 3] + own for i, own in enumerate(random_prompts([3, 1, 5, 2, 4, 6, 3], seed=22))]
PROMPTS += random_prompts([12], seed=23)


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt_oss", "bloom"))])
def test_texts_are_the_same_with_prefixes_of_groups_and_levels(
    family: str, asynchronous: bool, tiny: Tiny, engines: Engines
) -> None:
    path = tiny(family)
    settings = {"block_size": BLOCK, "backend": "torch", "dtype": "float32", "max_num_seqs": 8}
    settings |= {"scheduler.async": asynchronous, "cache.prefix_wait": BLOCK, "memory": "2MiB"}
    want = tokens_of(engines(path, **settings, **{"attention.cascade": False}), PROMPTS)
    llm = engines(path, **settings)
    group = next(group for group in llm.engine.runner.router.groups if group.cascade)
    seen, plan = list[tuple[int, int]](), group.backend.plan

    def noted(batch: Any) -> Any:
        if batch.prefix_groups is not None:
            seen.append((batch.prefix_groups.levels, len(batch.prefix_groups.segments)))
            assert batch.common_prefix_len == 0
        return plan(batch)

    group.backend.plan = noted  # type: ignore[method-assign]
    try:
        assert tokens_of(llm, PROMPTS) == want
    finally:
        del group.backend.plan
    assert max(seen) == (2, 4)


def test_the_groups_reach_the_batch_of_a_made_up_step(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), block_size=BLOCK, backend="torch")
    cascade = llm.engine.cascade
    assert cascade is not None
    prefixes = cascade.longest(np.array([1, 1]), 40, 2)
    batch = made_up_inputs(llm.engine.gatherer, [1, 1], seq_len=40, prefixes=prefixes).batches[0]
    assert batch.prefix_groups is not None
    assert batch.prefix_groups.segments.tolist() == [[0, 0, 36, 0]]
    assert cascade.longest(np.array([1, 1]), 4, 2) is None
