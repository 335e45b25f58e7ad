"""Correct values over many steps in which the backend itself fills the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, Run, check
from slotline.testing.environments.attention_choice import (
    block_sizes,
    build,
    chosen,
    device_of,
    longest_query,
    maker,
    need_query,
    refusal,
    writes_cache,
)
from slotline.testing.environments.attention_history import Pool
from slotline.testing.environments.attention_machine import explore
from slotline.testing.subject import Subject

SMALL_BLOCK = 4
"""Histories cross the edges of pages often where pages are small."""


def _pool(run: Run, **fields: Any) -> Pool:
    sizes = block_sizes(run.subject)
    small = refusal(run.subject, {"kernel_block_sizes": SMALL_BLOCK}) is None
    size = SMALL_BLOCK if small else min(sizes)
    limit = longest_query(run.subject, fields)
    case = chosen(run, ((min(limit, 1024), 1024),), block_size=size, **fields)
    blocks = max(24, -(-384 // size))
    backend = build(run, case)
    longest = max(192, 3 * size + 1)
    device = device_of(run.subject)
    return Pool(
        case,
        backend,
        num_blocks=blocks,
        longest=longest,
        device=device,
        writes_cache=writes_cache(run),
        world=maker(run),
    )


def _fill(run: Run, pool: Pool, number: int, length: int, most: int = 1 << 20) -> None:
    """Give a request `length` more tokens, as many at once as the backend accepts and `most` allows."""
    most = min(most, longest_query(run.subject, {}))
    while length > 0:
        count = min(most, length)
        pool.step({number: count}, run)
        length -= count


@check(Kind.ATTENTION, "attention.chunks.one_shot", Level.STATEFUL, profile="prefill")
def chunks(run: Run) -> None:
    """A prompt in chunks of any sizes gives what it gives in one piece."""
    need_query(run.subject, 2)
    pool = _pool(run)
    size = pool.case.block_size
    for sizes in ((70,), (1, 20, 16, 33), (size,) * 3 + (1,), (2,) * 9, (size + 1, size - 1 or 1, 5)):
        number = pool.admit()
        for count in sizes:
            _fill(run, pool, number, count)
        pool.finish(number)


@check(Kind.ATTENTION, "attention.batch.separate", Level.STATEFUL, profile="mixed")
def separate(run: Run) -> None:
    """Requests give the same in one mixed batch as each by itself."""
    counts = [1, 1, min(5, longest_query(run.subject, {})), min(30, longest_query(run.subject, {}))]
    for together in (True, False):
        pool = _pool(run)
        numbers = [pool.admit() for _ in counts]
        for number, prefix in zip(numbers, (17, 40, 9, 3), strict=True):
            _fill(run, pool, number, prefix)
        batch = dict(zip(numbers, counts, strict=True))
        for part in [batch] if together else [{number: count} for number, count in batch.items()]:
            pool.step(part, run)


@check(
    Kind.ATTENTION,
    "attention.verify.decodes",
    Level.STATEFUL,
    cases=lambda _: [{"tokens": n} for n in (2, 3, 5, 9)],
    profile="decode",
)
def verify_equals_decodes(run: Run) -> None:
    """1 + k tokens at once give what 1 + k single decodes give."""
    need_query(run.subject, run["tokens"])
    for at_once in (run["tokens"], 1):
        pool = _pool(run)
        numbers = [pool.admit() for _ in range(3)]
        for number, prefix in zip(numbers, (2 * pool.case.block_size - 1, 1, 25), strict=True):
            _fill(run, pool, number, prefix)
        for _ in range(2):
            for _ in range(run["tokens"] // at_once):
                pool.step(dict.fromkeys(numbers, at_once), run)


@check(Kind.ATTENTION, "attention.stateful.decode", Level.STATEFUL, profile="decode")
def long_decode(run: Run) -> None:
    """Requests decode across the edges of pages while others come and go and their blocks are reused."""
    pool = _pool(run)
    steady, passing = pool.admit(), pool.admit()
    _fill(run, pool, steady, 5)
    _fill(run, pool, passing, 7)
    for step in range(3 * min(pool.case.block_size, 16) + 2):
        if step % 5 == 4:
            pool.finish(passing)
            passing = pool.admit()
            _fill(run, pool, passing, 3 + step % 7)
        pool.step({passing: 1, steady: 1} if step % 2 else {steady: 1, passing: 1}, run)


@check(Kind.ATTENTION, "attention.stateful.rollback", Level.STATEFUL, profile="decode")
def rollback(run: Run) -> None:
    """Rejected tokens are forgotten: their slots are written again, blocks given back are used by others."""
    pool = _pool(run)
    most = min(5, longest_query(run.subject, {}))
    first, second = pool.admit(), pool.admit()
    _fill(run, pool, first, 2 * pool.case.block_size - 2)
    _fill(run, pool, second, 3)
    for accepted in (1, most, 2, 1, 3, most, 1):
        before = pool.requests[first].length
        pool.step({first: most, second: 1}, run)
        pool.roll_back(first, before + min(accepted, most))


@check(Kind.ATTENTION, "attention.stateful.fork", Level.STATEFUL, profile="decode")
def fork(run: Run) -> None:
    """Requests that share blocks go their own ways after a copy on write."""
    pool = _pool(run)
    parent = pool.admit()
    _fill(run, pool, parent, 2 * pool.case.block_size + 2)
    children = [pool.fork(parent) for _ in range(2)]
    for _ in range(3):
        pool.step(dict.fromkeys((parent, *children), 1), run)
    pool.finish(parent)
    for _ in range(2):
        pool.step(dict.fromkeys(children, 1), run)


def by_feature(subject: Subject) -> Iterable[Case]:
    """Return plain attention, and attention with a window and with latents if those are declared."""
    features: dict[str, dict[str, Any]] = {"sliding_window": {"window": 9}, "mla": {"mla": True}}
    return [{}, *(fields for name, fields in features.items() if refusal(subject, {name: True}) is None)]


@check(
    Kind.ATTENTION,
    "attention.stateful.random_history",
    Level.STATEFUL,
    cases=by_feature,
    cost=5.0,
    explores=True,
)
def random_history(run: Run) -> None:
    """Random histories of prompts, decodes, rollbacks, forks and departures over one pool of blocks."""
    explore(run, lambda: _pool(run), min(longest_query(run.subject, dict(run.case)), 100))
