"""The block pool and the prefix cache: who holds a block, who may find it, and which one goes first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from core_cases import Bench, request
from engine_driver import GREEDY, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from slotline.core import LLM, SamplingParams
from slotline.core.kv_cache.block_hashes import extend_hashes
from slotline.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from slotline.registry.errors import CapacityError, IntegrityError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(CapacityError, match="1 blocks needed, 0 free"):
        pool.allocate(1)


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(CapacityError):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check()


def test_the_null_block_can_be_shared_and_released_without_counting() -> None:
    pool = BlockPool(3)
    pool.share([NULL_BLOCK, NULL_BLOCK])
    pool.release([NULL_BLOCK])
    pool.remember(0, [NULL_BLOCK], [b"x"])
    assert pool.lookup(0, b"x") is None
    pool.check()


def test_blocks_without_cached_prefixes_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    pool.remember(0, [first], [b"1"])
    pool.remember(0, [third], [b"3"])
    pool.release([first])
    pool.release([second])
    pool.release([third])
    assert [pool.allocate(1) for _ in range(3)] == [[second], [first], [third]]


def test_the_least_recently_released_prefix_is_forgotten_first_and_its_end_before_its_start() -> None:
    pool = BlockPool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in old + new:
        pool.remember(0, [block], [bytes([block])])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.lookup(0, bytes([old[1]])) is None
    assert pool.lookup(0, bytes([old[0]])) == old[0]
    assert pool.allocate(3) == [old[0], new[1], new[0]]


def test_a_hit_makes_a_block_recent_again() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.remember(0, [a], [b"a"])
    pool.remember(0, [b], [b"b"])
    pool.release([a])
    pool.release([b])
    pool.share([a])
    pool.release([a])
    assert pool.allocate(1) == [b]


def test_a_shared_block_is_free_only_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.remember(0, [block], [b"h"])
    pool.share([block])
    assert pool.ref_count[block] == 2
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    assert pool.lookup(0, b"h") == block


def test_releasing_a_block_once_too_often_is_an_error() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(IntegrityError, match="more often"):
        pool.release(blocks[:1])
    with pytest.raises(IntegrityError, match="more often"):
        pool.release([3])


def test_the_first_block_with_a_prefix_stays_the_one_that_is_found() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.remember(0, [first], [b"same"])
    pool.remember(0, [second], [b"same"])
    pool.remember(1, [second], [b"same"])
    assert pool.lookup(0, b"same") == first
    assert pool.lookup(1, b"same") == second
    pool.check()


def test_reset_forgets_prefixes_and_keeps_references() -> None:
    pool = BlockPool(4)
    (held,) = pool.allocate(1)
    pool.remember(0, [held], [b"h"])
    pool.reset()
    assert pool.lookup(0, b"h") is None
    assert pool.ref_count[held] == 1
    pool.check()
    pool.release([held])
    assert pool.num_free == 3


def corrupt_count(pool: BlockPool) -> None:
    pool.ref_count[1] += 1


def corrupt_null(pool: BlockPool) -> None:
    pool.ref_count[NULL_BLOCK] = 1


def corrupt_free(pool: BlockPool) -> None:
    pool._free.popitem()


def corrupt_index(pool: BlockPool) -> None:
    pool._block_of[(0, b"ghost")] = 2


def corrupt_hash(pool: BlockPool) -> None:
    pool._hash_of.clear()


@pytest.mark.parametrize("damage", [corrupt_count, corrupt_null, corrupt_free, corrupt_index, corrupt_hash])
def test_the_pool_finds_its_own_damage(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.remember(0, [block], [b"h"])
    pool.release([block])
    pool.check()
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check()


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "name"]), st.integers(0, 5)), max_size=60))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_the_pool_agrees_with_plain_counting(actions: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(7), dict[int, int]()
    for action, number in actions:
        if action == "take" and number <= pool.num_free:
            for block in pool.allocate(number):
                assert block not in held
                held[block] = 1
        elif action == "share" and number + 1 in held:
            pool.share([number + 1])
            held[number + 1] += 1
        elif action == "drop" and number + 1 in held:
            pool.release([number + 1])
            held[number + 1] -= 1
            if not held[number + 1]:
                del held[number + 1]
        elif action == "name" and number + 1 in held and number + 1 not in pool._hash_of:
            pool.remember(0, [number + 1], [bytes([number % 3])])
        pool.check()
        assert {b: int(pool.ref_count[b]) for b in range(7) if pool.ref_count[b]} == held
        assert pool.num_free == 6 - len(held)


def chain(tokens: list[int], salt: str = "") -> list[bytes]:
    made = request("r", tokens)
    made.cache_salt = salt
    return extend_hashes(made, np.asarray(tokens, np.int32), len(tokens) // 4, 4)


def test_a_block_hash_depends_on_everything_before_it_and_on_the_salt() -> None:
    base = chain([1, 2, 3, 4, 5, 6, 7, 8])
    assert chain([1, 2, 3, 4, 5, 6, 7, 8]) == base
    assert chain([1, 2, 3, 4, 5, 6, 7, 9])[0] == base[0]
    changed = [chain([9, 2, 3, 4, 5, 6, 7, 8]), chain([1, 2, 3, 4, 5, 6, 7, 8], salt="x")]
    for other in changed:
        assert other[0] != base[0]
        assert other[1] != base[1]
    assert chain([5, 6, 7, 8])[0] != base[1]


def test_equal_prefixes_share_blocks_and_the_last_token_is_always_computed() -> None:
    bench = Bench(num_blocks=12)
    bench.add("a", list(range(8)), max_tokens=9)
    bench.step()
    same, longer = bench.add("same", list(range(8)), max_tokens=9), bench.add("longer", list(range(10)), max_tokens=9)
    schedule = bench.step()
    assert (same.metrics.num_cached_tokens, longer.metrics.num_cached_tokens) == (4, 8)
    blocks = bench.cache.groups[0].blocks
    assert blocks[same.row][0] == blocks[0][0]
    assert blocks[longer.row][:2] == blocks[0][:2]
    assert blocks[same.row][1] == blocks[0][1]  # it computed the last token itself, and both blocks were merged
    assert bench.cache.pool.ref_count[blocks[0][0]] == 3
    assert schedule.num_tokens == 1 + 4 + 2


@pytest.mark.parametrize(("sizes", "stretch", "unit"), [((4, 6), 2, 12), ((3, 9), 3, 9), ((8, 8), 8, 8)])
def test_prefixes_are_hashed_in_stretches_that_divide_every_groups_blocks(
    sizes: tuple[int, int], stretch: int, unit: int
) -> None:
    """The chain of hashes follows no group's block size, and a hit is whole blocks of each."""
    bench = Bench(num_blocks=600, max_batched_tokens=64, block_size=sizes)
    first = bench.add("first", list(range(29)), max_tokens=2)
    bench.step()
    assert len(first.block_hashes) == 29 // stretch
    for shared in range(29):
        other = bench.add(f"to {shared}", [*range(shared), *range(100, 132 - shared)][:31], max_tokens=1)
        bench.step()
        assert other.metrics.num_cached_tokens == shared // unit * unit
        bench.step()
    for group in bench.cache.groups:
        assert [bench.cache.pool.lookup(group.index, h) is not None for h in first.block_hashes] == [
            (i + 1) * stretch % group.block_size == 0 for i in range(len(first.block_hashes))
        ]


def test_sampled_tokens_are_cached_too() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=6)
    for _ in range(6):
        bench.step(lambda _: 7)
    follower = bench.add("b", [1, 2, 3, 7, 7, 7, 7, 7, 9], max_tokens=1)
    bench.step()
    assert follower.metrics.num_cached_tokens == 8


def test_cached_blocks_that_wake_up_count_against_the_free_ones() -> None:
    bench = Bench(num_blocks=4, max_model_len=16)
    bench.add("a", list(range(12)), max_tokens=1)
    bench.step()
    bench.add("other", [50, 51, 52, 53, 54], max_tokens=4)  # takes the free block and the end of a's prefix
    bench.step()
    again = bench.add("again", list(range(12)), max_tokens=1)
    bench.step()
    assert again.row == -1  # 2 cached blocks and 1 new one are needed, and only the 2 are free
    assert bench.cache.pool.num_free == 2


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_finished_requests_blocks_are_hit_by_later_ones(block_size: int, tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), block_size=block_size)
    (head,) = random_prompts([32], seed=11)
    fresh = llm.generate([[*head, 5]], GREEDY)[0]
    hit = llm.generate([[*head, 5]], GREEDY)[0]
    assert (fresh.metrics.num_cached_tokens, hit.metrics.num_cached_tokens) == (0, 32)
    assert fresh.outputs[0].token_ids == hit.outputs[0].token_ids


def test_requests_with_different_salts_share_nothing(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    (prompt,) = random_prompts([40], seed=12)

    def cached(salt: str) -> int:
        return llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], GREEDY)[0].metrics.num_cached_tokens

    assert [cached(salt) for salt in ("", "a", "b", "a", "")] == [0, 0, 0, 32, 32]


def test_prompt_logprobs_need_every_position_so_they_skip_the_cache(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    (prompt,) = random_prompts([40], seed=13)
    llm.generate([prompt], GREEDY)
    (scored,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0))
    assert scored.metrics.num_cached_tokens == 0
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == 40


def test_with_prefix_caching_off_nothing_is_shared(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **{"cache.prefix_caching": False})
    (prompt,) = random_prompts([40], seed=14)
    assert [llm.generate([prompt], GREEDY)[0].metrics.num_cached_tokens for _ in range(2)] == [0, 0]
