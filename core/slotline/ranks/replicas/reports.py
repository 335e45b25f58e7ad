"""What the front and a replica tell each other. Everything is pickled, many requests in one message."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slotline.core.api.outputs import RequestMetrics, TokenLogprobs
from slotline.core.engine.engine import Engine
from slotline.registry.engine_reports import MemoryReport
from slotline.registry.errors import RequestError
from slotline.registry.loading import one_line

ADDRESS, NUMBER = "SLOTLINE_FRONT", "SLOTLINE_REPLICA"
"""Variables of a replica: where the front listens, with its key, and the number of the replica."""

NAME = 8
"""Bytes of a prefix's hash by which front and replicas call it."""


class BlockCounts(NamedTuple):
    """Blocks that an engine has asked its KV connector for.

    Attributes:
        asked: those that the cache lacked.
        loads, lost: those whose load was started, and those of them that failed on any rank.
        held, failed: by rank, those that its connector held, and those that it could not load.
        events: by rank, numbers of other events by name. With several ranks they are as of the last lookup.
    """

    asked: int
    loads: int
    lost: int
    held: tuple[int, ...]
    failed: tuple[int, ...]
    events: tuple[Mapping[str, float], ...] = ()


class Load(NamedTuple):
    """Load of an engine at a time.

    Attributes:
        running, waiting: requests in the batch, and those that wait for a place in it.
        most_running: places in it.
        blocks, free: blocks of the cache, and the free ones among them.
        stored: blocks of the KV connector, None without one.
    """

    running: int = 0
    waiting: int = 0
    most_running: int = 0
    blocks: int = 0
    free: int = 0
    stored: BlockCounts | None = None


class Add(NamedTuple):
    """A request. `options` are further arguments of `Engine.add`."""

    key: int
    request_id: str
    prompt_token_ids: npt.NDArray[np.int64]
    params: Any
    options: dict[str, Any]


class Abort(NamedTuple):
    """The end of a request."""

    key: int


class Call(NamedTuple):
    """A call of a function of a module with the replica's engine and arguments, answered by an `Answer`.

    It is made between two steps, or at once if the function only `reads`.
    """

    number: int
    function: Callable[..., Any]
    given: tuple[Any, ...]
    reads: bool = False


class Batch(NamedTuple):
    """What a replica is asked to do, in order. It is answered by the `Report` with the same number."""

    number: int
    asked: Sequence[Add | Abort | Call]


class Answer(NamedTuple):
    """What a call returned or raised."""

    number: int
    value: Any
    error: BaseException | None


class News(NamedTuple):
    """What a step gave to a request whose text or log-probabilities are read while it runs.

    Attributes:
        text: all that no later token can change, None if nobody decodes it here.
        logprobs: of new tokens.
        prompt_logprobs: once, when they are complete.
    """

    key: int
    text: str | None
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None


class End(NamedTuple):
    """The end of a request.

    Attributes:
        token_ids: [n] int32, all tokens.
        logprobs: those that were in no `News`.
        pooled: the public form of the answer of a request that samples nothing.
    """

    key: int
    token_ids: npt.NDArray[np.int32]
    text: str
    reason: str | None
    cause: str | int | None
    metrics: RequestMetrics
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    pooled: Any


class PrefixNews(NamedTuple):
    """Prefixes that came and went since the last report, by the first `NAME` bytes of their hashes.

    Attributes:
        cleared: whether all were lost first.
        removed, stored: names, one behind the other.
    """

    cleared: bool
    removed: bytes
    stored: bytes

    @property
    def removed_names(self) -> list[bytes]:
        """Return the names of those that were lost."""
        return _cut(self.removed)

    @property
    def stored_names(self) -> list[bytes]:
        """Return the names of those that came."""
        return _cut(self.stored)


class Report(NamedTuple):
    """What happened since the last report.

    Attributes:
        handled: number of the last batch that was done.
        refused: keys of requests that were refused, with the errors.
        keys, token_ids: [n] int64 and int32, tokens of requests that are read while they run.
        others: number of all other tokens.
        raised: what escaped from a step. The replica steps again when it is told anything.
        prefixes: what the cache holds that it did not hold before, None for no change.
    """

    handled: int
    refused: Sequence[tuple[int, BaseException]]
    keys: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    others: int
    news: Sequence[News]
    ended: Sequence[End]
    load: Load
    raised: BaseException | None
    prefixes: PrefixNews | None = None


class Ready(NamedTuple):
    """The first message of a replica whose engine is built.

    Attributes:
        digest: of its plan.
        startup: seconds of each phase of building.
    """

    digest: str
    memory: MemoryReport | None
    startup: dict[str, float]
    load: Load
    notes: tuple[str, ...]


class Failed(NamedTuple):
    """The last message of a replica that an error ends."""

    error: BaseException


def load_of(engine: Engine) -> Load:
    """Return the load of an engine."""
    scheduler, pool = engine.scheduler, engine.scheduler.cache.pool
    transfer = engine.extension("kv_transfer")
    return Load(
        len(scheduler.running),
        scheduler.num_waiting,
        engine.rows.max_requests,
        pool.num_blocks - 1,
        pool.num_free,
        None if transfer is None else transfer.counts,
    )


def _cut(names: bytes) -> list[bytes]:
    return [names[first : first + NAME] for first in range(0, len(names), NAME)]


def sendable(error: BaseException) -> BaseException:
    """Return an error that can be unpickled elsewhere: itself, or one with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        kind = RequestError if isinstance(error, RequestError) else RuntimeError
        return kind(one_line(error))
    return error
