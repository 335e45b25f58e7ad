"""The encoder cache and the schedule around it, without a model."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from core_cases import Bench, request

from slotline.core.batch.extensions import Extensions
from slotline.core.batch.graph_dispatcher import GraphDispatcher
from slotline.core.batch.request import Status
from slotline.plugins.multimodal.encoder_cache import EncoderCache
from slotline.plugins.multimodal.features import Feature, hash_extra
from slotline.registry.errors import IntegrityError


def feature(name: int, start: int, size: int = 4) -> Feature:
    """An item of `size` embeddings whose span starts at `start`."""
    positions = np.arange(start, start + size)
    return Feature(modality="image", mm_hash=f"{name:064x}", positions=positions, inputs={})


def bench(capacity: int = 8, per_step: int = 8, **settings: Any) -> Bench:
    return Bench(encoder_cache=EncoderCache(capacity, per_step), prefix_caching=False, **settings)


def names(features: tuple[Feature, ...]) -> list[int]:
    return [int(one.mm_hash, 16) for one in features]


def cache_of(made: Bench) -> EncoderCache:
    assert made.encoder_cache is not None
    return made.encoder_cache


@pytest.mark.behaviour(76)
def test_a_step_encodes_only_the_items_that_it_touches_in_order() -> None:
    made = bench(max_batched_tokens=6)
    made.add("a", 14, features=(feature(1, 2), feature(2, 8)))
    assert [names(made.encode().encode) for _ in range(3)] == [[1], [2], []]


def test_a_chunk_ends_before_an_item_that_the_step_has_no_room_to_encode() -> None:
    made = bench(capacity=8, per_step=4)
    made.add("a", 14, features=(feature(1, 2), feature(2, 8)))
    steps = [(made.step(), made.taken) for _ in range(2)]
    assert [step.num_scheduled.tolist() for step, _ in steps] == [[8], [6]]
    assert [names(items.encode) for _, items in steps] == [[1], [2]]


@pytest.mark.behaviour(32)
def test_an_item_is_dropped_when_its_room_is_needed_and_no_sooner() -> None:
    made = bench(capacity=8)
    made.add("a", 6, features=(feature(1, 0),), max_tokens=1)
    made.add("b", 6, features=(feature(2, 0),), max_tokens=1)
    first = made.encode()
    assert (names(first.encode), first.dropped) == ([1, 2], ())
    assert cache_of(made).num_used == 8  # kept, though nobody holds them: others may show the same
    made.add("c", 6, features=(feature(2, 0),), max_tokens=1)
    assert made.encode().encode == ()
    made.add("d", 6, features=(feature(3, 0),), max_tokens=1)
    third = made.encode()
    assert (names(third.encode), third.dropped) == ([3], (f"{1:064x}",))


def test_a_request_waits_while_others_hold_all_room_and_the_step_goes_on() -> None:
    made = bench(capacity=4, max_batched_tokens=5)
    made.add("a", 9, features=(feature(1, 2),), max_tokens=4)
    made.add("b", 8, features=(feature(2, 1),), max_tokens=4)
    made.step()  # a holds its item: two of its tokens are left
    second = made.step()
    assert made.names(second) == ["b", "a"]  # b's first token alone, before its item
    assert second.num_scheduled.tolist() == [1, 4]
    assert names(made.taken.encode) == []
    for _ in range(12):
        made.step()
    assert not made.scheduler.running
    assert made.scheduler.num_waiting == 0


def test_budget_that_a_waiting_item_leaves_goes_to_the_next_request() -> None:
    made = bench(capacity=4, max_batched_tokens=8)
    made.add("b", 12, features=(feature(2, 6, 4),), priority=1, max_tokens=4)
    made.step()  # b is in the middle of its item
    made.add("a", 6, features=(feature(1, 0),), priority=0, max_tokens=4)
    step = made.step()
    assert made.names(step) == ["b"]  # a would go first, and has nowhere to put its item
    assert "a" in made.names(made.step())


@pytest.mark.behaviour(32)
def test_a_preempted_request_lets_its_items_go_and_takes_them_again() -> None:
    made = bench(capacity=4, num_blocks=4, max_batched_tokens=8)
    made.add("a", 7, max_tokens=8)
    victim = made.add("b", 12, features=(feature(1, 0, 4),), max_tokens=2)
    preempted = False
    for _ in range(20):
        step = made.step()
        preempted |= victim in step.preempted
        if victim.status is Status.PREEMPTED:
            assert victim not in cache_of(made)._held
    assert preempted
    assert victim.status is Status.FINISHED


def test_a_request_that_the_budget_leaves_nothing_for_has_nothing_encoded() -> None:
    made = bench(max_batched_tokens=6)
    first = made.add("a", 2, max_tokens=20)
    made.add("b", 10, features=(feature(1, 6),))
    assert made.step().num_scheduled.tolist() == [2, 4]
    for _ in range(8):  # as if more of it were known
        made.rows.append(np.array([first.row]), np.array([7], np.int32))
    step = made.step()
    assert (made.names(step), made.taken.encode) == (["a"], ())


def test_room_that_a_preemption_frees_gives_no_request_more_tokens_than_blocks() -> None:
    made = bench(capacity=2, max_batched_tokens=6, num_blocks=5)
    sparse = Feature(modality="image", mm_hash="ff", positions=np.array([2, 8]), inputs={})
    victim = made.add("v", 9, features=(sparse,), priority=2, max_tokens=2)
    made.step()
    made.add("a", 12, features=(feature(1, 2, 2),), priority=0, max_tokens=2)
    made.add("b", 9, priority=1, max_tokens=2)
    assert made.names(made.step()) == ["b", "v", "a"]  # a stands before its item: v holds all room
    third = made.step()  # b needs a block, v loses its own and its item's room; the checker looks at a's blocks
    assert third.preempted == (victim,)
    assert made.names(third) == ["b"]
    for _ in range(12):
        made.step()
    assert victim.status is Status.FINISHED


def test_an_item_that_was_to_be_encoded_for_an_aborted_request_alone_is_not() -> None:
    cache = EncoderCache(8, 8)
    one, other = request("a", [1] * 9), request("b", [1] * 9)
    one.inputs["features"] = other.inputs["features"] = (feature(1, 0),)
    assert cache.reach(one, 0, 9) == 9
    cache.release(one)
    assert cache.take() == ((), ())
    assert cache.num_used == 0
    assert cache.reach(other, 0, 9) == 9
    assert names(cache.take()[0]) == [1]


def test_without_chunked_prefill_a_prompt_waits_until_all_its_items_fit() -> None:
    made = bench(capacity=8, per_step=8, chunked_prefill=False)
    made.add("a", 8, features=(feature(1, 0),))
    made.add("b", 8, features=(feature(2, 0), feature(3, 4)))
    assert [made.names(made.step()) for _ in range(3)] == [["a"], ["a", "b"], ["a", "b"]]


def test_a_step_with_items_runs_eagerly() -> None:
    made = bench()
    shapes = GraphDispatcher(
        {"mixed": "full", "decode": "full"}, [1, 2, 16], query_len=1, max_requests=4, max_tokens=16
    )
    made.add("a", 6, features=(feature(1, 2),))
    assert shapes.shape_for(made.step()) is None
    assert shapes.shape_for(made.step()) is not None


def test_hashes_tell_items_and_places_apart() -> None:
    found = {hash_extra((feature(name, start),), 4, 8) for name in (1, 2) for start in (2, 3, 4, 7)}
    assert len(found) == 8
    assert hash_extra((feature(1, 0), feature(1, 8)), 4, 8) == b""


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_with_items_all_end_and_nothing_is_left(seed: int) -> None:
    rng = Random(seed)
    made = bench(
        capacity=rng.choice([4, 8, 12]),
        per_step=rng.choice([4, 8]),
        max_batched_tokens=rng.choice([3, 6, 16]),
        num_blocks=rng.choice([8, 12]),
    )
    left, queued = 30, 0
    for _ in range(800):
        if left and rng.random() < 0.5:
            left, queued = left - 1, queued + 1
            starts = sorted(rng.sample([1, 5, 10, 14], rng.randint(0, 3)))
            items = tuple(feature(rng.randint(1, 5), start) for start in starts)
            made.add(f"r{left}", rng.randint(19, 22), features=items, max_tokens=rng.randint(1, 6))
        made.step()
        assert sum(one.size for one in made.taken.encode) <= cache_of(made).max_tokens_per_step
        if made.scheduler.running and rng.random() < 0.03:
            made.scheduler.remove(rng.choice(made.scheduler.running))
            made.check()
        if not (left or made.scheduler.running or made.scheduler.num_waiting):
            break
    assert queued == 30
    assert not made.scheduler.running
    cache_of(made).reset()
    assert cache_of(made).num_used == 0


def _holder(made: Bench) -> Any:
    (held,) = cache_of(made)._held.values()
    return held


@pytest.mark.parametrize(
    ("breaking", "message"),
    [
        (lambda made: _holder(made).clear(), "is held 0 times and counts 1"),
        (lambda made: setattr(next(iter(cache_of(made)._entries.values())), "holders", 2), "counts 2"),
        (lambda made: cache_of(made)._entries.clear(), "counts None"),
        (lambda made: cache_of(made)._idle.update({f"{1:064x}": None}), "idle"),
        (lambda made: setattr(cache_of(made), "capacity", 3), "4 embeddings are kept"),
        (lambda made: cache_of(made).release(made.scheduler.running[0]), "does not hold item 0"),
    ],
)
@pytest.mark.behaviour(32)
def test_the_integrity_checker_sees_a_broken_rule(breaking: Any, message: str) -> None:
    made = bench(max_batched_tokens=4)
    made.add("a", 9, features=(feature(1, 2),))
    made.step()  # two of the item's tokens are computed
    breaking(made)
    with pytest.raises(IntegrityError, match=message):
        made.check()


def test_the_integrity_checker_sees_a_request_that_keeps_its_items_after_it_lost_its_blocks() -> None:
    made = bench(max_batched_tokens=4)
    held = made.add("a", 9, features=(feature(1, 2),))
    made.step()
    features = dict(_holder(made))
    made.scheduler._preempt_last()
    cache_of(made)._held[held] = features
    cache_of(made)._entries[features[0].mm_hash].holders = 1
    cache_of(made)._idle.clear()
    with pytest.raises(IntegrityError, match="is preempted and holds 1 encoder outputs"):
        made.check()


def test_what_other_extensions_leave_out_has_nothing_encoded() -> None:
    class Rest:
        def limit_tokens(self, rows: Any, counts: Any) -> Any:
            return np.where(rows == 0, 0, counts)

        def limit_prompt(self, request: Any, computed: int, count: int) -> int:
            return min(count, 2)

    made = bench(max_batched_tokens=6)
    made.scheduler.extensions = Extensions.of([("multimodal", "items", made.items), ("rest", "rest", Rest())])
    made.add("a", 8, features=(feature(1, 2),))
    made.add("b", 8, features=(feature(2, 2),))
    assert (made.encode().encode, made.scheduler.running[0].row) == ((), 0)
    items = made.encode()  # the first one rests, and leaves the budget and the room to the other
    assert names(items.encode) == [2]
