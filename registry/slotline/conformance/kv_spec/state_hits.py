"""Prefixes whose state is kept: a request continues from the longest one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

from slotline.registry.contracts import BlockHash
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.state_spec import Held, build_spec, unit_cases

NEEDS = {"state": True, "prefix_caching": True}
MOST_UNITS = 6


def chain(rng: Random, length: int) -> list[BlockHash]:
    """Return the hashes of prefixes of 1, 2, ... units."""
    return [rng.randbytes(32) for _ in range(length)]


def compare(held: Held, hashes: Sequence[BlockHash], kept: Sequence[bool]) -> None:
    """Compare the answer of `prefix_hit` with the longest kept prefix.

    Raises:
        Failed: if they differ.
    """
    known = {block_hash for block_hash, is_kept in zip(hashes, kept, strict=True) if is_kept}
    found: Any = held.spec.prefix_hit(tuple(hashes), known.__contains__)
    wanted = max((length for length in range(len(hashes) + 1) if length == 0 or kept[length - 1]), default=0)
    if not isinstance(found, int) or isinstance(found, bool):
        raise Failed(f"prefix_hit returned {found!r}, wanted an int")
    show = f"kept are the prefixes of {[n for n, is_kept in enumerate(kept, 1) if is_kept]} units out of {len(hashes)}"
    if not 0 <= found <= len(hashes):
        raise Failed(f"prefix_hit is {found}: {show}")
    if found and not kept[found - 1]:
        raise Failed(f"prefix_hit is {found}, and the state behind that prefix is not kept: {show}")
    if found != wanted:
        raise Failed(f"prefix_hit is {found}, and the longest one is {wanted}: {show}")


@check(Kind.KV_SPEC, "kv_spec.state.hit.longest", Level.NUMERICS, needs=NEEDS, cases=unit_cases, cost=0.02)
def hit_longest(run: Run) -> None:
    """Any of a chain's prefixes may be kept: the longest of them is the hit, and none is where nothing is kept."""
    held, rng = build_spec(run), run.rng
    for length in range(MOST_UNITS + 1):
        for kept in product((False, True), repeat=length):
            compare(held, chain(rng, length), kept)


@check(Kind.KV_SPEC, "kv_spec.state.hit.asked_again", Level.HOSTILE, needs=NEEDS, cases=unit_cases, cost=0.02)
def hit_asked_again(run: Run) -> None:
    """Checkpoints come and go between two questions about a chain, and the chain is asked about in part."""
    held, rng = build_spec(run), run.rng
    hashes = chain(rng, MOST_UNITS)
    for _ in range(40):
        kept = [rng.random() < 0.5 for _ in hashes]
        for length in range(MOST_UNITS, -1, -1):
            compare(held, hashes[:length], kept[:length])
