"""`/v1/engine`: requests, the cache's blocks and tokens, as they are now. It has no texts and no tokens of requests.

The numbers are read while the steps go on, so that no step waits for a reader. Two of them may be of different steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from importlib.metadata import version as version_of
from operator import itemgetter

import numpy as np
import numpy.typing as npt
from attrs import frozen
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from slotline.core.batch.request import Request as EngineRequest
from slotline.core.engine.engine import Engine
from slotline.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.ranks.replicas.front import Front
from slotline.ranks.replicas.replica_front import ReplicaFront
from slotline.registry.errors import SlotlineError
from slotline.server.http import encode
from slotline.server.state import ServerState

Int = npt.NDArray[np.int64]
CELLS = 1024
"""Cells of a map of the blocks at most. Larger pools have several blocks in a cell."""
SHARED_FOR = 0.25
"""Seconds for which an answer serves for all who ask, so that their number costs the engine nothing."""
LISTED = 100
"""Requests that are listed singly at most."""
FREE, CACHED, USED, SHARED = range(4)
_LETTERS = ".cus"
"""A cell's letters by the state of its blocks."""


class RequestView(Struct, kw_only=True):
    """Numbers of a request. One that waits and has no row yet has computed nothing and holds no blocks."""

    id: str
    status: str
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    blocks: int
    preemptions: int
    seconds: float


class RequestsView(Struct, kw_only=True):
    """Numbers of all requests, and some of them singly."""

    running: int
    waiting: int
    most_running: int
    prompts_unfinished: int
    most_unfinished: int
    unfinished: list[RequestView]


class GroupView(Struct, kw_only=True):
    """Blocks of a cache group.

    Each letter of `cells` is a cell of the pool, in the order of the blocks' numbers: `.` if the group has none of its
    blocks, else `c` (cached), `u` (used) or `s` (shared), the state of most of those that it has.
    """

    name: str
    block_size: int
    cached: int
    used: int
    shared: int
    cells: str


class CacheView(Struct, kw_only=True):
    """Blocks of the cache.

    A block is free, cached (free, and its contents can be found), used by one request, or shared by several.
    """

    blocks: int
    free: int
    cached: int
    used: int
    shared: int
    blocks_per_cell: int
    groups: list[GroupView]


class EngineView(Struct, kw_only=True):
    """State of the engine.

    `status` is `ready`, `draining` or `failed`. `plan` is the plan's digest. `started` are seconds since the epoch.
    `seconds` are those of a clock that only goes forward, to tell how fast `generated_tokens` grows.
    """

    object: str = "engine"
    status: str
    version: str
    plan: str
    chat_template: bool
    started: int
    seconds: float
    generated_tokens: int
    requests: RequestsView
    cache: CacheView


async def show_engine(state: ServerState, _request: Request) -> Response:
    """Answer with the engine's state, also after its end."""
    if time.monotonic() - state.view_made >= SHARED_FOR:
        front = state.llm.front
        parts = await asyncio.to_thread(_parts, front) if isinstance(front, ReplicaFront) else _parts(front)
        state.view, state.view_made = encode(engine_view(state, parts)), time.monotonic()
    return Response(state.view, headers={"cache-control": "no-store"}, media_type="application/json")


@frozen(kw_only=True)
class PartView:
    """State of one engine: that of the server, or of a replica.

    Attributes:
        running, waiting, most_running: numbers of requests.
        unfinished: some of them.
    """

    running: int
    waiting: int
    most_running: int
    unfinished: list[RequestView]
    cache: CacheView


def engine_view(state: ServerState, parts: Sequence[PartView]) -> EngineView:
    """Return the state of the engine, or of all its replicas."""
    engine = state.llm.front
    return EngineView(
        status="failed" if state.llm.error is not None else "draining" if state.draining else "ready",
        version=version_of("slotline"),
        plan=engine.plan.digest,
        chat_template=engine.tokenizer is not None and bool(engine.tokenizer.transformers.chat_template),
        started=state.started,
        seconds=time.monotonic(),
        generated_tokens=state.llm.num_generated,
        requests=RequestsView(
            running=sum(part.running for part in parts),
            waiting=sum(part.waiting for part in parts),
            most_running=sum(part.most_running for part in parts),
            prompts_unfinished=state.llm.num_unfinished,
            most_unfinished=state.config.max_unfinished,
            unfinished=[one for part in parts for one in part.unfinished][:LISTED],
        ),
        cache=_all_caches([part.cache for part in parts]),
    )


def part_view(engine: Engine) -> PartView:
    """Return the state of an engine."""
    known = [request for request in tuple(engine.requests.values()) if request.leader is None]
    cache = engine.scheduler.cache
    return PartView(
        running=len(engine.scheduler.running),
        waiting=engine.scheduler.num_waiting,
        most_running=engine.rows.max_requests,
        unfinished=[_request(engine, request, request.row) for request in known[:LISTED]],
        cache=cache_view(cache.pool, cache.groups, [group.name for group in engine.plan.cache_groups]),
    )


def _parts(front: Front) -> list[PartView]:
    """Return the state of each replica, or of the engine. None of replicas that have failed."""
    if not isinstance(front, ReplicaFront):
        return [part_view(front)]
    try:
        return front.ask(part_view, reads=True)
    except SlotlineError:
        return []


def _all_caches(caches: Sequence[CacheView]) -> CacheView:
    """Return the caches of all replicas as one, in their order."""
    if len(caches) == 1:
        return caches[0]
    sums = {name: sum(getattr(one, name) for one in caches) for name in ("blocks", "free", "cached", "used", "shared")}
    groups = [
        GroupView(
            name=same[0].name,
            block_size=same[0].block_size,
            cached=sum(one.cached for one in same),
            used=sum(one.used for one in same),
            shared=sum(one.shared for one in same),
            cells="".join(one.cells for one in same),
        )
        for same in zip(*(one.groups for one in caches), strict=True)
    ]
    return CacheView(**sums, blocks_per_cell=max((one.blocks_per_cell for one in caches), default=1), groups=groups)


def _request(engine: Engine, request: EngineRequest, row: int) -> RequestView:
    rows, prompt, known, computed, blocks = engine.rows, len(request.prompt_token_ids), 0, 0, 0
    if row >= 0:
        known = int(rows.num_tokens[row] - rows.num_pending[row])
        computed = int(rows.num_computed_tokens[row])
        blocks = sum(int(np.count_nonzero(_held(group, row))) for group in engine.scheduler.cache.groups)
    return RequestView(
        id=request.request_id,
        status=request.status.value,
        prompt_tokens=prompt,
        output_tokens=max(0, known - prompt),
        computed_tokens=computed,
        blocks=blocks,
        preemptions=request.metrics.num_preemptions,
        seconds=round(time.monotonic() - request.arrival_time, 3),
    )


def cache_view(pool: BlockPool, groups: Sequence[CacheGroup], names: Sequence[str]) -> CacheView:
    """Return the number of blocks in each state, and a map of the pool for each cache group.

    Args:
        pool: the blocks. The null block is left out.
        groups: the cache groups that share them.
        names: of the groups.
    """
    states, owners = _blocks(pool, groups)
    size = max(1, -(-len(states) // CELLS))
    free, cached, used, shared = _counts(states)
    views = []
    for group, name in zip(groups, names, strict=True):
        own = np.where(owners == group.index, states, FREE)
        _, *counts = _counts(own)
        views.append(
            GroupView(
                name=name,
                block_size=group.block_size,
                cached=counts[0],
                used=counts[1],
                shared=counts[2],
                cells=_cells(own, size),
            )
        )
    return CacheView(
        blocks=len(states), free=free, cached=cached, used=used, shared=shared, blocks_per_cell=size, groups=views
    )


def _blocks(pool: BlockPool, groups: Sequence[CacheGroup]) -> tuple[Int, Int]:
    """Return the state and the cache group of each block but the null block. Free ones have no group, -1."""
    counts, findable = pool.ref_count.copy(), pool.findable()
    cached = np.fromiter(findable, np.int64, len(findable))
    states = np.where(counts > 1, SHARED, np.where(counts == 1, USED, FREE))
    states[cached] = np.maximum(states[cached], CACHED)
    owners = np.full(len(counts), -1)
    owners[cached] = np.fromiter(map(itemgetter(0), findable.values()), np.int64, len(findable))
    for group in groups:
        for row in np.flatnonzero(group.num_held).tolist():
            held = _held(group, row)
            owners[held[counts[held] > 0]] = group.index
    return states[NULL_BLOCK + 1 :], owners[NULL_BLOCK + 1 :]


def _held(group: CacheGroup, row: int) -> Int:
    """Return the blocks in a row's table, among them the null block."""
    return (group.table[row, : group.num_held[row] * group.ratio : group.ratio] // group.ratio).astype(np.int64)


def _counts(states: Int) -> list[int]:
    """Return the number of blocks in each state."""
    counts: list[int] = np.bincount(states, minlength=SHARED + 1).tolist()
    return counts


def _cells(states: Int, size: int) -> str:
    """Return a letter for each `size` blocks: the most frequent state of those that are not free."""
    cells = np.arange(len(states)) // size
    votes = np.bincount(cells * (SHARED + 1) + states, minlength=(int(cells[-1]) + 1) * (SHARED + 1))
    votes = votes.reshape(-1, SHARED + 1)
    votes[:, FREE] = 0
    return "".join(_LETTERS[state] for state in votes.argmax(1).tolist())
