"""Variants of worlds: needles, shared prefixes, stale tokens, parts and copies of a world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve

from slotline.registry.contracts.prefix_groups import PrefixGroups
from slotline.testing.environments.attention import Case, World

NEEDLE_SCORE = 30.0
"""Score of a needle; all others are about normal, so that its weight is 1 up to any rounding."""
NEEDLE_VALUE = 20.0
NEEDLE_STEP = 4.0
"""Between the values of KV heads; an eight-bit float still holds them."""
STALE_VALUE = 1000.0


class Segment(NamedTuple):
    """Keys `first` .. `end` - 1 that `requests` share, at a level from 0."""

    requests: Sequence[int]
    first: int
    end: int
    level: int = 0


def plant(world: World, request: int, position: int, note: str = "") -> None:
    """Make one key decide the output of every query of a request that sees it.

    All query tokens become equal, the key is aligned with them, and its value is large. A wrong mask there changes the
    output by about `NEEDLE_VALUE` instead of vanishing in the noise. KV head k gets the value ``NEEDLE_VALUE +
    NEEDLE_STEP * k``.

    Args:
        world: the world, changed in place.
        request, position: request and position of the key.
        note: meaning of the position, for the message of a failure.
    """
    case = world.case
    direction = _directions(world, case.num_kv_heads)
    world.queries[request][:] = direction.repeat_interleave(case.num_heads // case.num_kv_heads, 0).to(case.dtype)
    world.keys[request][position] = _aligned(world, direction, NEEDLE_SCORE)
    values = NEEDLE_VALUE + NEEDLE_STEP * torch.arange(case.num_kv_heads)[:, None].expand(-1, world.layer.head_size_v)
    world.values[request][position] = values.to(case.cache_dtype)
    world.notes[request] = f"; needle at position {position}{note and ', ' + note}"
    world.store(request)


def hide(world: World, request: int, position: int, how: str) -> None:
    """Make a planted needle harder to find for a backend that judges blocks of keys by summaries.

    Args:
        world: the world, changed in place.
        request, position: of the needle.
        how: ``negative`` aligns it only where the query is negative. ``opposed`` puts its opposite next to it.
            ``one_head`` leaves it to one KV head: the values of the others are all 1, their queries and keys random.
    """
    case = world.case
    group, keys = case.num_heads // case.num_kv_heads, world.keys[request]
    if how == "negative":
        direction = world.queries[request][-1, ::group].float()  # [Hkv, D]
        part = direction.clamp_max(0)
        score = NEEDLE_SCORE / (world.layer.scale * part.square().sum(1, keepdim=True))
        keys[position] = (part * score).to(case.dtype).to(case.cache_dtype)
    elif how == "opposed":
        beside = position - 1 if position % case.block_size else position + 1
        if beside < len(keys) and beside // case.block_size == position // case.block_size:
            keys[beside] = -keys[position]
    else:
        for head in set(range(case.num_kv_heads)) - {request % case.num_kv_heads}:
            own = world.queries[request][:, head * group : (head + 1) * group]
            own[:] = world.random(*own.shape)
            keys[position, head] = world.random(case.head_size).to(case.cache_dtype)
            world.values[request][:, head] = 1.0
    world.store(request)


def repel(world: World, score: float) -> None:
    """Turn all keys away from all queries, so that every score that a query sees is about `score`, below zero."""
    direction = _directions(world, 1)
    for request in range(len(world.case.requests)):
        world.queries[request][:] = direction.to(world.case.dtype)
        world.keys[request][:] = _aligned(world, direction, score)
        world.store(request)


def leave_stale_needles(world: World) -> None:
    """Fill every unused slot with a key that all queries are aligned with, and a huge finite value."""
    case, direction, size = world.case, _directions(world, 1), world.case.block_size
    key = _aligned(world, direction, NEEDLE_SCORE)[0]
    free = set(range(world.num_blocks)) - {block for own in world.owned for block in own}
    slots = [block * size + offset for block in sorted(free) for offset in range(size)]
    for request, (_, length) in enumerate(case.requests):
        world.queries[request][:] = direction.to(case.dtype)
        if length % size:
            slots += [world.owned[request][-1] * size + offset for offset in range(length % size, size)]
    shape = (len(slots), case.num_kv_heads)
    values = torch.full((*shape, world.layer.head_size_v), STALE_VALUE).to(case.cache_dtype)
    world.put(torch.tensor(slots), key.expand(*shape, case.head_size).contiguous(), values, live=False)


def share_prefix(world: World, length: int, *, announced: bool = False) -> None:
    """Let requests with a prefix of `length` tokens, whole blocks, share the first request's blocks.

    Args:
        world: the world, changed in place.
        length: tokens.
        announced: True to set the batch's common prefix.
    """
    count = length // world.case.block_size
    lender = world.owned[0][:count]
    for request, (query_len, total) in enumerate(world.case.requests):
        if request == 0 or total - query_len < length:
            continue
        world.spoil(world.owned[request][:count])
        for dense in (world.keys, world.values):
            dense[request][:length] = dense[0][:length]
        world.owned[request][:count] = lender
        world.host_table[request, :count] = torch.tensor(lender, dtype=torch.int32)
    world.block_table.copy_(world.host_table)
    world.batch = world.make_batch()
    if announced:
        announce_prefix(world, length)


def announce_prefix(world: World, length: int) -> None:
    """Put a common prefix into a world's batch."""
    world.batch.common_prefix_len = length
    world.batch.common_prefix = torch.tensor([length], dtype=torch.int32, device=world.device)


def share_segments(world: World, segments: Sequence[Segment]) -> None:
    """Let the requests of each segment share the blocks of the first of them, and announce it.

    Args:
        world: the world, changed in place.
        segments: those of a level after those of the level before.
    """
    size = world.case.block_size
    for requests, first, end, _ in segments:
        lender, places = requests[0], slice(first // size, end // size)
        for request in requests[1:]:
            world.spoil(world.owned[request][places])
            for dense in (world.keys, world.values):
                dense[request][first:end] = dense[lender][first:end]
            world.owned[request][places] = world.owned[lender][places]
            world.host_table[request, places] = world.host_table[lender, places]
    world.block_table.copy_(world.host_table)
    world.batch = world.make_batch()
    announce_segments(world, segments)


def announce_segments(world: World, segments: Sequence[Segment]) -> None:
    """Put prefixes of groups of requests into a world's batch."""
    batch = world.batch
    arrays = segment_arrays(segments, batch.query_start_loc_cpu)
    batch.prefix_groups = prefix_groups(arrays, 1 + max(one.level for one in segments), world.device)


def segment_arrays(
    segments: Sequence[Segment], starts: npt.NDArray[np.int32], room: tuple[int, int] | None = None
) -> dict[str, npt.NDArray[np.int32]]:
    """Return the arrays of `PrefixGroups` on the host.

    Args:
        segments: those of a level after those of the level before.
        starts: [num_requests + 1], the requests' first query tokens.
        room: segments and levels that there is room for, as in a captured shape. None for as many as there are.
    """
    count, levels = room or (len(segments), 1 + max(one.level for one in segments))
    num_tokens = int(starts[-1])
    tokens = [token for one in segments for r in one.requests for token in range(starts[r], starts[r + 1])]
    ends = np.cumsum([sum(int(starts[r + 1] - starts[r]) for r in one.requests) for one in segments])
    own, depths = np.zeros(len(starts) - 1, np.int32), np.zeros(num_tokens, np.int32)
    for one in segments:
        for request in one.requests:
            own[request] = one.end
            depths[starts[request] : starts[request + 1]] = one.level + 1
    bounds = [(one.requests[0], one.first, one.end, one.level) for one in segments]
    return {
        "segments": np.array(bounds + [(0, 0, 0, 0)] * (count - len(bounds)), np.int32).reshape(count, 4),
        "starts": np.array([0, *ends, *[len(tokens)] * (count - len(bounds))], np.int32),
        "tokens": np.array(tokens + [0] * (levels * num_tokens - len(tokens)), np.int32),
        "own": own,
        "depths": depths,
    }


def prefix_groups(arrays: Mapping[str, npt.NDArray[np.int32]], levels: int, device: torch.device | str) -> PrefixGroups:
    """Return prefixes of groups on a device and on the host."""
    fields: dict[str, Any] = {name: torch.from_numpy(array.copy()).to(device) for name, array in arrays.items()}
    fields |= {f"{name}_cpu": array for name, array in arrays.items()}
    return PrefixGroups(levels=levels, **fields)


def redrawn(world: World, index: int | None = None) -> World:
    """Return the same batch and tables with other tokens.

    They are in the same cache, or in a new one as layer `index` of the group.
    """
    other = _copy(world, world.case)
    if index is not None:
        other.layer = world.case.layer(index)
        other.buffers, other.cache = other.empty_cache()
    case = world.case
    other.keys = [world.random(*each.shape).to(case.cache_dtype) for each in world.keys]
    other.values = [world.value_of(key) for key in other.keys]
    other.queries = [world.random(*each.shape, times=case.amplitude) for each in world.queries]
    for request in range(len(case.requests)):
        other.store(request)
    if case.stale and index is not None:
        other.leave_old_tokens()
    return other


def only(world: World, request: int) -> World:
    """Return a batch of one request of a world, over the same cache."""
    other = _copy(world, evolve(world.case, requests=(world.case.requests[request],), padding=0))
    for name in ("queries", "keys", "values", "owned"):
        setattr(other, name, [getattr(world, name)[request]])
    other.host_table = world.host_table[request : request + 1]
    other.block_table = other.host_table.to(world.device)
    other.batch = other.make_batch()
    return other


def of_last_tokens(world: World, kept: Sequence[bool]) -> World:
    """Return the same cache and requests with only the last query token of each kept request."""
    requests = tuple((int(keep), length) for keep, (_, length) in zip(kept, world.case.requests, strict=True))
    some = _copy(world, evolve(world.case, requests=requests))
    some.queries = [query[len(query) - count :] for query, (count, _) in zip(world.queries, requests, strict=True)]
    some.batch = some.make_batch()
    return some


def tail(world: World, request: int, count: int) -> World:
    """Return a batch of the last `count` query tokens of one request of a world, over the same cache."""
    other = only(world, request)
    other.case = evolve(other.case, requests=((count, other.case.requests[0][1]),))
    other.queries = [other.queries[0][-count:]]
    other.batch = other.make_batch()
    return other


def part_of(world: World, request: int, count: int, length: int) -> World:
    """Return a batch of one request that ends at `length` and whose last `count` tokens are new, over the same cache.

    Its queries are random.
    """
    case = world.case
    other = _copy(world, evolve(case, requests=((count, length),)))
    other.queries = [world.random(count, case.num_heads, case.head_size)]
    other.keys, other.values = [world.keys[request][:length]], [world.values[request][:length]]
    other.owned = [world.owned[request]]
    other.host_table = world.host_table[request : request + 1]
    other.block_table = other.host_table.to(world.device)
    other.batch = other.make_batch()
    return other


def in_place(world: World) -> World:
    """Return another batch with the same numbers of requests and blocks, in the same tensors and arrays."""
    requests = world.case.requests[1:] + world.case.requests[:1]
    other = world.like(evolve(world.case, requests=requests, seed=world.case.seed + 1))
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "positions"):
        tensor = getattr(world.batch, name)
        tensor.copy_(getattr(other.batch, name))
        setattr(other.batch, name, tensor)
    for name in ("query_start_loc_cpu", "seq_lens_cpu"):
        array = getattr(world.batch, name)
        array[:] = getattr(other.batch, name)
        setattr(other.batch, name, array)
    return other


def _copy(world: World, case: Case) -> World:
    other = copy(world)
    other.__dict__.pop("dense", None)
    other.case, other.notes = case, {}
    return other


def _directions(world: World, count: int) -> torch.Tensor:
    """Return [count, D] float32, each of the length of a query."""
    direction = world.random(count, world.case.head_size).float()
    lengths: torch.Tensor = direction.norm(dim=1, keepdim=True)
    scaled: torch.Tensor = direction / lengths * world.case.head_size**0.5
    return scaled


def _aligned(world: World, direction: torch.Tensor, score: float) -> torch.Tensor:
    """Return keys that give queries along `direction` that score."""
    key = direction * (score / (world.layer.scale * world.case.head_size))
    return key.to(world.case.dtype).to(world.case.cache_dtype)
