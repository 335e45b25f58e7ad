"""Cached blocks that a new request may continue from, compared with a model that tries all lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from slotline.registry.contracts import BlockHash
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.kv_spec import KNOWN_KINDS, Group, build_group, every_kind_cases, group_cases
from slotline.testing.oracles.kv_spec import freeable_blocks, longest_prefix, resumable, unbroken_prefix

NEEDS = {"prefix_caching": True}
NULL_BLOCK = 0
MOST_BLOCKS = 6
"""The environment's sequences have room for one token behind six full blocks."""

Pool = dict[BlockHash, int]


def chain(rng: Random, length: int) -> list[BlockHash]:
    """Return hashes of `length` blocks."""
    return [rng.randbytes(32) for _ in range(length)]


def pool_of(hashes: Sequence[BlockHash], cached: Sequence[bool], rng: Random) -> Pool:
    """Return a pool that has these blocks, under random ids, and many other blocks."""
    ids = rng.sample(range(1, 70000), len(hashes) + 8)
    pool = {block_hash: ids[n] for n, block_hash in enumerate(hashes) if cached[n]}
    return pool | dict(zip(chain(rng, 8), ids[len(hashes) :], strict=True))


def answer(group: Group, hashes: Sequence[BlockHash], pool: Pool) -> list[int]:
    """Return the spec's answer, with its form checked.

    Raises:
        Failed: if it is not a list of block ids, or longer than the chain.
    """
    found: Any = group.spec.prefix_hit(tuple(hashes), pool.get)
    if not isinstance(found, list) or any(not isinstance(block, int) for block in found):
        raise Failed(f"prefix_hit returned {found!r}, wanted a list of block ids")
    if len(found) > len(hashes):
        raise Failed(f"prefix_hit returned {len(found)} blocks for {len(hashes)} hashes: {found}")
    for index, block in enumerate(found):
        if block not in (NULL_BLOCK, pool.get(hashes[index])):
            raise Failed(
                f"prefix_hit says block {block} for entry {index}; the cache has {pool.get(hashes[index])} there: "
                f"{show(group, hashes, pool, found)}"
            )
    return found


def compare(group: Group, hashes: Sequence[BlockHash], pool: Pool) -> None:
    """Compare the spec's answer with the model."""
    found = answer(group, hashes, pool)
    if not all(layer.kv_kind in KNOWN_KINDS for layer in group.layers):
        return
    size = group.block_size
    freeable = freeable_blocks(group.layers, group.max_model_len, size)
    first = int(freeable[len(found) * size])
    what = show(group, hashes, pool, found)
    missing = [index for index in range(first, len(found)) if found[index] == NULL_BLOCK]
    if missing:
        raise Failed(
            f"entry {missing[0]} is the null block, and token {len(found) * size} or a later one reads it: {what}"
        )
    if not resumable(hashes, pool.get, len(found), freeable, size):
        raise Failed(f"a block that later tokens read is not cached: {what}")
    least = longest_prefix(hashes, pool.get, freeable, size) if group.exact else unbroken_prefix(hashes, pool.get)
    if len(found) < least:
        raise Failed(f"a prefix of {least} blocks is cached, prefix_hit finds {len(found)}: {what}")


def show(group: Group, hashes: Sequence[BlockHash], pool: Pool, found: Sequence[int]) -> str:
    """Return the case in one line."""
    return f"cached {[pool.get(block_hash) for block_hash in hashes]}, answer {list(found)}; {group.describe()}"


def _patterns(length: int) -> Iterator[list[bool]]:
    """Return all subsets of a chain, 2 ** length of them."""
    for number in range(2**length):
        yield [bool(number >> place & 1) for place in range(length)]


@check(Kind.KV_SPEC, "kv_spec.prefix.empty", Level.NUMERICS, needs=NEEDS, cases=every_kind_cases)
def prefix_empty(run: Run) -> None:
    """Without a full block there is no hit, and with an empty cache there is none that would be read."""
    group, rng = build_group(run), run.rng
    if answer(group, (), pool_of((), (), rng)):
        raise Failed("prefix_hit finds blocks for a chain of none")
    for length in range(1, MOST_BLOCKS + 1):
        hashes = chain(rng, length)
        compare(group, hashes, pool_of(hashes, [False] * length, rng))


@check(Kind.KV_SPEC, "kv_spec.prefix.longest", Level.NUMERICS, needs=NEEDS, cases=every_kind_cases)
def prefix_longest(run: Run) -> None:
    """The first n blocks are cached, one after the other: they are the hit."""
    group, rng = build_group(run), run.rng
    for length in range(1, MOST_BLOCKS + 1):
        for cached in range(length + 1):
            hashes = chain(rng, length)
            compare(group, hashes, pool_of(hashes, [place < cached for place in range(length)], rng))


@check(Kind.KV_SPEC, "kv_spec.prefix.holes", Level.HOSTILE, needs=NEEDS, cases=every_kind_cases, cost=0.3)
def prefix_holes(run: Run) -> None:
    """Any of a chain's blocks may have left the cache: the hit has a block wherever a later token reads."""
    group, rng = build_group(run), run.rng
    for length in range(1, MOST_BLOCKS + 1):
        for cached in _patterns(length):
            hashes = chain(rng, length)
            compare(group, hashes, pool_of(hashes, cached, rng))


@check(Kind.KV_SPEC, "kv_spec.prefix.asked_again", Level.HOSTILE, needs=NEEDS, cases=every_kind_cases)
def prefix_asked_again(run: Run) -> None:
    """The pool changes between two questions with the same chain: the second answer is of the new pool."""
    group, rng = build_group(run), run.rng
    for _ in range(30):
        length = rng.randint(1, MOST_BLOCKS)
        hashes = chain(rng, length)
        for _ in range(4):
            compare(group, hashes, pool_of(hashes, [rng.random() < 0.7 for _ in hashes], rng))


@check(Kind.KV_SPEC, "kv_spec.prefix.shortened", Level.HOSTILE, needs=NEEDS, cases=group_cases)
def prefix_shortened(run: Run) -> None:
    """Several groups agree on a prefix by asking again with fewer hashes, and each answer is right for its length."""
    group, rng = build_group(run), run.rng
    hashes = chain(rng, MOST_BLOCKS)
    for _ in range(20):
        pool = pool_of(hashes, [rng.random() < 0.8 for _ in hashes], rng)
        for length in range(MOST_BLOCKS, -1, -1):
            compare(group, hashes[:length], pool)
