"""`Router`: prefixes stay where they were computed, and load stays balanced."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slotline.ranks.replicas.reports import NAME, PrefixNews
from slotline.ranks.replicas.router import BLOCK, WORTH, Router

MARGIN = 4000


def prompt(blocks: list[int], rest: int = 0) -> np.ndarray:
    """Return a prompt of full blocks, each known by its number, and some tokens."""
    return np.concatenate([np.repeat(np.array(blocks, np.int64), BLOCK), np.zeros(rest, np.int64)])


def test_requests_without_a_common_prefix_go_to_the_least_loaded_and_ties_to_the_first() -> None:
    router = Router(3, margin=MARGIN, remembered=100)
    assert [router.route(prompt([], 5), weight) for weight in (10, 10, 10, 1, 5, 5)] == [0, 1, 2, 0, 1, 2]


def test_the_longest_prefix_wins_until_the_replica_is_too_far_above_the_least() -> None:
    router = Router(2, margin=MARGIN, remembered=100)
    assert router.route(prompt([1]), 100) == 0
    assert router.route(prompt([2, 3, 4]), 100) == 1
    assert router.route(prompt([2, 3, 5]), 100) == 1
    assert router.route(prompt([1, 9]), 100) == 0
    router.assign(1, 3 * BLOCK * WORTH)
    assert router.route(prompt([2, 3, 4]), 1) == 1  # exactly what the prefix is worth
    router.assign(1, 200)
    assert router.route(prompt([2, 3, 4]), 1) == 0


def test_other_keys_share_nothing_and_reloaded_weights_neither() -> None:
    router = Router(2, margin=MARGIN, remembered=100)
    router.route(prompt([1, 2]), 10, "a")
    assert router.route(prompt([1, 2]), 1, "b") == 1
    assert router.route(prompt([1, 2]), 1, "a") == 0
    router.forget()
    assert router.route(prompt([1, 2]), 1, "a") == 1


def test_what_was_not_used_for_long_is_forgotten_from_its_end() -> None:
    def after(load: int) -> int:
        router = Router(2, margin=MARGIN, remembered=3)
        router.route(prompt([1, 2, 3]), 0)
        router.assign(1, 1)
        router.route(prompt([7]), 0)  # displaces the third block
        router.assign(0, 1 + load)
        return router.route(prompt([1, 2, 3]), 0)

    assert after(2 * BLOCK * WORTH) == 0
    assert after(2 * BLOCK * WORTH + 1) == 1


def news(stored: list[bytes], removed: list[bytes] | None = None, *, cleared: bool = False) -> PrefixNews:
    return PrefixNews(cleared, b"".join(removed or []), b"".join(stored))


def test_the_replica_that_holds_the_longest_prefix_gets_the_request_while_it_holds_it() -> None:
    router = Router(2, margin=MARGIN, remembered=100)
    names = [bytes([number] * NAME) for number in range(6)]
    router.learn(1, news(names[:4]))
    router.learn(0, news(names[:2]))
    assert router.route_held(names, 16, 10) == 1
    router.ended(1, 10, names)
    router.learn(1, news([], names[1:4]))  # it had to give them up, and nobody is asked to forget them
    assert router.route_held(names, 16, 10) == 0
    assert router.route_held(names, 16, 10) == 0  # which computes the rest
    router.assign(0, 6 * 16 * WORTH + 1)
    assert router.route_held(names, 16, 0) == 1
    for _ in range(2):
        router.ended(0, 10, names)
    router.ended(1, 0, names)
    router.learn(0, news([], cleared=True))
    router.assign(0, -6 * 16 * WORTH - 1)
    assert router.route_held(names, 16, 0) == 1  # it has the first block
    router.learn(2, news(names))  # of a replica that has left
    router.forget()
    router.ended(1, 0, names)
    assert router.route_held(names, 16, 0) == 0
    assert router.loads == [0, 0]


def test_without_prefix_caching_nothing_is_remembered() -> None:
    router = Router(2, margin=MARGIN, remembered=0)
    assert [router.route(prompt([1, 2]), 10) for _ in range(4)] == [0, 1, 0, 1]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.lists(st.integers(0, 3), max_size=6), st.integers(1, 1000)),  # a request: its blocks, its weight
        st.integers(0, 50),  # the end of one of those that run
    ),
    max_size=80,
)


@settings(deadline=None)
@given(STEPS, st.integers(1, 4))
def test_no_replica_starves_and_equal_prompts_go_together(steps: list, replicas: int) -> None:
    router = Router(replicas, margin=MARGIN, remembered=10_000)
    running: list[tuple[int, int]] = []
    went: dict[tuple[int, ...], set[int]] = {}  # the replicas that have computed each prefix
    for step in steps:
        if isinstance(step, int):
            if running:
                router.ended(*running.pop(step % len(running)))
            continue
        blocks, weight = step
        before, worth = list(router.loads), min(MARGIN, WORTH * BLOCK * len(blocks))
        chosen, same = router.route(prompt(blocks), weight), went.get(tuple(blocks), set())
        assert before[chosen] - min(before) <= worth
        if any(before[one] - min(before) <= worth for one in same) and blocks:
            assert chosen in same
        for count in range(1, len(blocks) + 1):
            went.setdefault(tuple(blocks[:count]), set()).add(chosen)
        running.append((chosen, weight))
    assert router.loads == [sum(weight for one, weight in running if one == replica) for replica in range(replicas)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(1, 500)), min_size=1, max_size=100))
def test_load_stays_balanced_within_a_margin_and_the_heaviest_request(requests: list) -> None:
    router = Router(3, margin=MARGIN, remembered=50)
    for blocks, weight in requests:
        router.route(prompt(blocks), weight)
    assert max(router.loads) - min(router.loads) <= MARGIN + max(weight for _, weight in requests)


def test_replicas_that_leave_get_nothing_and_new_ones_know_nothing() -> None:
    router = Router(2, margin=MARGIN, remembered=100)
    assert [router.route(prompt([one]), 10) for one in (1, 2)] == [0, 1]
    router.choose_among(3)
    assert router.route(prompt([3]), 10) == 2
    router.choose_among(1)
    assert [router.route(prompt([one]), 10) for one in (2, 3, 4)] == [0, 0, 0]
    router.ended(2, 10)
    router.remove_last()
    router.choose_among(2)  # the second is taken back, and knows its prefix
    assert router.route(prompt([2]), 1) == 1
    router.choose_among(3)
    assert router.loads == [40, 11, 0]
