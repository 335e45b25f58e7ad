"""What plugins hear of blocks, against a model of the pool: what they know of each block is what it holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

import numpy as np
import pytest
from core_cases import request

from slotline.builder.watched_blocks import BlockLog, WatchedGroup, WatchedPool, in_kernel_blocks
from slotline.core.batch.extensions import Extensions
from slotline.core.batch.request import Request, Status
from slotline.core.batch.request_table import RequestTable
from slotline.core.kv_cache.kv_cache_manager import KVCacheManager
from slotline.plugins.kv_specs.full_cache import FullSpec
from slotline.registry.contracts import BlockEvents, BlockHash, CacheBlock, KVSpecContext

ROWS, LENGTH, NULL = 5, 40, 0
Contents = tuple[int, ...]


class Store:
    """A connector's store of the blocks that the pool gave up, whose loads may take a while."""

    def __init__(self, cache: dict[int, Contents], slow: bool) -> None:
        self.cache, self.slow = cache, slow
        self.kept: dict[tuple[int, BlockHash], Contents] = {}
        self.coming: dict[int, tuple[CacheBlock, Contents]] = {}
        self.log: BlockLog | None = None
        self.pool: WatchedPool | None = None

    def find_blocks(self, _: Request, group: int, hashes: Sequence[BlockHash]) -> Collection[BlockHash]:
        return [one for one in hashes if (group, one) in self.kept]

    def fill_block(self, block: CacheBlock) -> None:
        assert self.log is not None
        assert self.pool is not None
        self.log.load(block)
        self.coming[block.block] = block, self.kept[block.group, block.block_hash]
        if self.slow:
            self.pool.share([block.block])

    def block_evicted(self, block: CacheBlock) -> None:
        if self.coming.pop(block.block, None) is None:
            self.kept[block.group, block.block_hash] = self.cache[block.block]

    def held_blocks(self) -> Collection[int]:
        return list(self.coming) if self.slow else ()

    def arrive(self, rng: Random) -> None:
        """Copy in what is on its way, or a part of it."""
        for block, (_, contents) in list(self.coming.items()):
            if not self.slow or rng.random() < 0.5:
                self.cache[block] = contents
                del self.coming[block]
                if self.slow:
                    assert self.pool is not None
                    self.pool.release([block])


class Listener:
    """Keeps for each block what it holds, as a plugin with summaries would."""

    def __init__(self, cache: dict[int, Contents], groups: int) -> None:
        self.cache, self.known = cache, dict[int, Contents]()
        self.held: list[set[int]] = [set() for _ in range(groups)]
        self.heard = {"returned": 0, "given": 0, "restored": 0, "loaded": 0}

    def hear(self, events: Sequence[BlockEvents]) -> None:
        assert len({one.group for one in events}) == len(events)
        for one in events:
            held = self.held[one.group]
            returned, given, restored, loaded = (getattr(one, name).tolist() for name in self.heard)
            for name in self.heard:
                self.heard[name] += len(getattr(one, name))
            assert NULL not in returned + given + restored + loaded
            taken = given + restored + loaded
            assert len(set(taken)) == len(taken)
            assert len(one.hashes) == len(restored) + len(loaded)
            held -= set(returned)
            assert not held & set(taken), "taken a second time and not returned"
            held |= set(taken)
            for block in given:
                self.known[block] = ()
            for block in loaded:
                self.known[block] = self.cache[block]


class Traffic:
    """Rows with requests of few different prompts, whose tokens are written to blocks by steps."""

    def __init__(self, seed: int, *, slow: bool, ratio: int = 1) -> None:
        self.rng, self.rows = Random(seed), RequestTable(ROWS, LENGTH)
        self.cache: dict[int, Contents] = {}
        self.log, self.store = BlockLog(), Store(self.cache, slow)
        self.groups = [
            WatchedGroup(self.log, index, spec_of(size, size // ratio), size, size // ratio, ROWS, LENGTH)
            for index, size in enumerate((4, 8))
        ]
        self.pool = WatchedPool(14, self.log)
        self.store.log, self.store.pool = self.log, self.pool
        extensions = Extensions.of([("store", "the store", self.store)])
        self.manager = KVCacheManager(self.pool, self.groups, prefix_caching=True, extensions=extensions)
        self.listener = Listener(self.cache, len(self.groups))
        self.number = 0

    @property
    def running(self) -> list[int]:
        return [row for row, one in enumerate(self.rows.requests) if one is not None]

    def join(self) -> None:
        """Admit a request with the longest prefix that is there."""
        if not self.rows.num_free:
            return
        self.number += 1
        motif = self.rng.randrange(3)
        prompt = [motif] * 9 + [self.rng.randrange(2) for _ in range(self.rng.randint(0, 12))]
        one = request(f"request {self.number}", prompt)
        known = np.array(prompt, np.int32)
        hit, prefix = self.manager.find_prefix(one, known)
        row = self.rows.admit(one, 0)
        one.status = Status.RUNNING
        if not self.manager.try_admit(row, prefix, len(prompt), one.block_hashes):
            self.rows.release(one)
            return
        self.rows.num_computed_tokens[row] = hit

    def leave(self, row: int) -> None:
        self.manager.release(row)
        self.rows.release(self.rows.request(row))

    def step(self) -> None:
        """Tell of the events, compare what is known with what is there, and write new tokens."""
        self.store.arrive(self.rng)
        coming = set(self.store.coming) if self.store.slow else set()
        self.listener.hear(self.log.take(len(self.groups), coming))
        held = {int(block) for block in np.flatnonzero(self.pool.ref_count)}
        assert set().union(*self.listener.held) == held - coming
        for group, own in zip(self.groups, self.listener.held, strict=True):
            assert own == {block for blocks in group.blocks for block in blocks} - coming - {NULL}
        for block in held - coming:
            assert self.listener.known[block] == self.cache.get(block, ()) or not self.listener.known[block], block
        for row in self.running:
            if coming & {block for group in self.groups for block in group.blocks[row]}:
                continue
            self.advance(row)

    def advance(self, row: int) -> None:
        """Compute tokens of a row: what its blocks hold is now known to all, since a step wrote it."""
        computed, known = int(self.rows.num_computed_tokens[row]), int(self.rows.num_tokens[row])
        for group in self.groups:
            for index in range(computed // group.block_size):
                held = self.cache[group.blocks[row][index]]
                assert held == tuple(self.rows.token_ids[row, : (index + 1) * group.block_size].tolist())
                assert self.listener.known[group.blocks[row][index]] == held, "a summary is stale"
        if known == computed:
            if known >= LENGTH - 1 or not self.manager.try_grow(row, known + 1):
                self.leave(row)
                return
            self.rows.token_ids[row, known] = self.rng.randrange(2)
            self.rows.num_tokens[row] = known = known + 1
        end = self.rng.randint(computed + 1, known)
        for group in self.groups:
            for index in range(computed // group.block_size, -(-end // group.block_size)):
                block = group.blocks[row][index]
                until = min(end, (index + 1) * group.block_size)
                self.cache[block] = self.listener.known[block] = tuple(self.rows.token_ids[row, :until].tolist())
        self.rows.num_computed_tokens[row] = end
        self.manager.commit(self.rows, np.array([row]), np.array([end]))

    def fail(self) -> None:
        """An exception escapes from a step, after events were taken that nobody heard."""
        if self.rng.random() < 0.5:
            self.log.take(len(self.groups))
        self.manager.restore()
        for row in self.running:
            self.rows.release(self.rows.request(row))
        if self.store.slow:
            self.pool.drop(block for block, _ in self.store.coming.values())
        self.store.coming.clear()
        for held in self.listener.held:
            held.clear()
        self.listener.known.clear()


def spec_of(block_size: int, kernel_block_size: int) -> FullSpec:
    return FullSpec(
        KVSpecContext(
            contract=1,
            layers=(),
            block_size=block_size,
            kernel_block_size=kernel_block_size,
            layout="NHD",
            kv_dtype="float32",
            max_model_len=LENGTH,
        )
    )


@pytest.mark.parametrize("slow", [False, True], ids=["waits", "asynchronous"])
@pytest.mark.parametrize("failing", [False, True], ids=["", "recovery"])
def test_what_a_listener_knows_of_each_block_is_what_it_holds(slow: bool, failing: bool) -> None:
    """Admission, growth, prefixes, loads, preemption, ends, forgotten prefixes, and exceptions, in any order."""
    heard = dict.fromkeys(("returned", "given", "restored", "loaded"), 0)
    for seed in range(6):
        traffic = Traffic(seed, slow=slow)
        for _ in range(150):
            for _ in range(traffic.rng.randint(0, 3)):
                traffic.join()
            for row in traffic.running:
                if traffic.rng.random() < 0.12:
                    traffic.leave(row)
            if traffic.rng.random() < 0.01:
                traffic.manager.reset()
                traffic.store.kept.clear()
                for row in traffic.running:
                    traffic.leave(row)
            traffic.step()
            if failing and traffic.rng.random() < 0.05:
                traffic.fail()
        for name, count in traffic.listener.heard.items():
            heard[name] += count
    assert min(heard.values()) > 50, heard


def test_kernel_blocks_of_an_event_are_the_parts_of_its_blocks_and_keep_their_hashes() -> None:
    given, none = np.array([3, 7]), np.zeros(0, np.int64)
    events = BlockEvents(group=1, returned=none, given=none, restored=given[:1], loaded=given[1:], hashes=(b"a", b"b"))
    found = in_kernel_blocks(events, 2)
    assert (found.group, found.restored.tolist(), found.loaded.tolist()) == (1, [6, 7], [14, 15])
    assert found.hashes == (b"a", b"a", b"b", b"b")
    assert in_kernel_blocks(events, 1) is events


def test_a_block_that_was_returned_and_taken_between_two_steps_is_in_both_and_a_passing_holder_in_none() -> None:
    log = BlockLog()
    pool = WatchedPool(8, log)
    one, two = pool.allocate(2)
    log.owners.update({one: 0, two: 1})
    first = log.take(2)
    assert [(e.group, e.given.tolist()) for e in first] == [(0, [one]), (1, [two])]
    pool.release([one])
    (again,) = pool.allocate(1)
    assert again == one
    log.owners[one] = 1
    (passing,) = pool.allocate(1)
    pool.release([passing])
    zero, other = log.take(2)
    assert (zero.returned.tolist(), zero.given.tolist()) == ([one], [])
    assert (other.returned.tolist(), other.given.tolist()) == ([], [one])
    assert log.take(2) == []
    with pytest.raises(ValueError, match="read-only"):
        other.given[0] = 5
