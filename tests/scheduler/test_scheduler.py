"""The scheduler over rows and cache, without a model."""

from __future__ import annotations

import numpy as np
import pytest
from core_cases import Bench, cache_of, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotline.core.batch.request import Request, Status
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.scheduler.integrity import check_integrity
from slotline.registry.errors import CapacityError, IntegrityError


def counts(bench: Bench, schedule: SchedulerOutput) -> dict[str, int]:
    """Scheduled tokens by request, of a step after which none has left."""
    return dict(zip(bench.names(schedule), schedule.num_scheduled.tolist(), strict=True))


@pytest.mark.behaviour(89)
def test_with_nothing_to_do_a_step_is_empty() -> None:
    schedule = Bench().step()
    assert schedule.num_tokens == len(schedule.rows) == schedule.num_decodes == 0


@pytest.mark.behaviour(7)
def test_the_token_budget_is_filled_and_never_exceeded() -> None:
    bench = Bench(max_batched_tokens=10)
    for name in "abc":
        bench.add(name, 6, max_tokens=4)
    assert counts(bench, bench.step()) == {"a": 6, "b": 4}
    assert counts(bench, bench.step()) == {"a": 1, "b": 2, "c": 6}
    for _ in range(10):
        assert bench.step().num_tokens <= 10


def test_requests_run_in_the_order_of_their_arrival() -> None:
    bench = Bench(max_requests=2)
    for name in "abc":
        bench.add(name, 3, max_tokens=2)
    assert bench.names(bench.step()) == ["a", "b"]
    bench.step()
    assert bench.names(bench.step()) == ["c"]


def test_a_lower_priority_number_runs_first_and_ties_go_by_arrival() -> None:
    bench = Bench(max_requests=1)
    order = []
    for name, priority in (("late", 5), ("a", 1), ("b", 1), ("first", -3)):
        bench.add(name, 3, priority=priority, max_tokens=1)
    for _ in range(4):
        order += [r.request_id for r in bench.step().admitted]
    assert order == ["first", "a", "b", "late"]


@pytest.mark.behaviour(61)
def test_a_long_prompt_comes_in_chunks_and_gets_its_token_with_the_last() -> None:
    bench = Bench(max_batched_tokens=8)
    long = bench.add("long", 20, max_tokens=3)
    chunks = []
    while not long.finished:
        chunks += bench.step().num_scheduled.tolist()
        assert long.finished or bench.rows.num_tokens[long.row] == 20 + max(0, len(chunks) - 2)
    assert chunks == [8, 8, 4, 1, 1]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_all_of_it() -> None:
    bench = Bench(max_batched_tokens=10, chunked_prefill=False)
    bench.add("a", 6, max_tokens=2)
    bench.add("b", 10, max_tokens=1)
    bench.add("c", 2, max_tokens=1)  # would fit, but does not overtake
    assert counts(bench, bench.step()) == {"a": 6}
    assert [r.request_id for r in bench.step().admitted] == []
    assert bench.step().num_scheduled.tolist() == [10]
    assert bench.step().num_scheduled.tolist() == [2]


@pytest.mark.behaviour(45, 46)
def test_single_token_requests_come_first_in_the_batch_the_longest_at_the_front() -> None:
    bench = Bench(max_batched_tokens=16)
    for name, length in (("a", 2), ("b", 9), ("c", 2), ("d", 6)):
        bench.add(name, length, max_tokens=9)
    bench.step()  # a, b, c whole, d cut to 3
    schedule = bench.step()
    assert bench.names(schedule) == ["b", "a", "c", "d"]
    assert schedule.num_scheduled.tolist() == [1, 1, 1, 3]
    assert schedule.num_computed.tolist() == [9, 2, 2, 3]
    bench.scheduler.remove(bench.scheduler.running[0])
    late = bench.add("e", 5, max_tokens=9)
    schedule = bench.step()
    assert bench.names(schedule) == ["b", "d", "c", "e"]
    assert late.row == 0
    assert schedule.rows.tolist() == [1, 3, 2, 0]  # batch order, not row order
    assert (schedule.num_decodes, schedule.num_tokens) == (3, 8)
    assert schedule.num_computed.tolist() == [10, 6, 3, 0]


@pytest.mark.behaviour(45, 46)
def test_a_chunk_of_an_urgent_request_stands_behind_single_tokens_of_others() -> None:
    bench = Bench(max_batched_tokens=6)
    bench.add("a", 2, max_tokens=9)
    bench.add("b", 2, max_tokens=9)
    bench.step()
    bench.add("urgent", 14, priority=-1, max_tokens=9)
    bench.step()  # urgent's first 4 tokens
    schedule = bench.step()  # urgent goes first: 6 tokens, nothing is left for the others
    assert counts(bench, schedule) == {"urgent": 6}
    schedule = bench.step()  # its last 4, and one for each of the others
    assert bench.names(schedule) == ["a", "b", "urgent"]
    assert (schedule.num_scheduled.tolist(), schedule.num_decodes) == ([1, 1, 4], 2)
    assert schedule.num_computed.tolist() == [3, 3, 10]


def out_of_blocks() -> tuple[Bench, list[Request]]:
    """Three requests of which the last in order has just lost its blocks: 6 blocks of 4 tokens, 2 + 2 + 1 held."""
    bench = Bench(num_blocks=6, max_model_len=16, prefix_caching=False)
    requests = [bench.add("a", 7, max_tokens=9), bench.add("b", 7, max_tokens=9), bench.add("c", 2, max_tokens=9)]
    for _ in range(2):
        assert not bench.step().preempted
    return bench, requests


@pytest.mark.behaviour(33)
def test_the_running_request_that_is_last_in_order_is_preempted() -> None:
    bench, (a, b, c) = out_of_blocks()
    schedule = bench.step()  # a takes the last block for its ninth token, b needs one more
    assert schedule.preempted == (c,)
    assert counts(bench, schedule) == {"a": 1, "b": 1}
    assert (c.status, c.metrics.num_preemptions) == (Status.PREEMPTED, 1)
    assert bench.rows.num_computed_tokens[c.row] == 0
    assert bench.cache.groups[0].blocks[c.row] == []
    assert [r.status for r in (a, b)] == [Status.RUNNING] * 2


def test_the_last_by_priority_is_preempted_even_if_it_came_first() -> None:
    bench = Bench(num_blocks=4, max_model_len=16, prefix_caching=False)
    unimportant = bench.add("unimportant", 7, priority=9, max_tokens=9)
    bench.step()
    bench.add("important", 7, priority=1, max_tokens=9)
    preempted: list[Request] = []
    while not preempted:
        preempted += bench.step().preempted
    assert preempted == [unimportant]


def test_a_preempted_request_returns_before_one_that_arrived_later() -> None:
    bench, (_, b, c) = out_of_blocks()
    later = bench.add("later", 1, max_tokens=1)  # would fit into what is left over, long before the other one does
    assert bench.step().preempted == (c,)
    admitted: list[Request] = []
    while bench.scheduler.num_waiting:
        admitted += bench.step().admitted
    assert [request for request in admitted if request is not b] == [c, later]
    assert later.arrival > c.arrival


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    bench = Bench(num_blocks=7, max_model_len=16, max_batched_tokens=32, prefix_caching=False)
    _, _, c = (bench.add(name, 7, max_tokens=9) for name in "abc")
    for _ in range(2):
        assert not bench.step().preempted
    urgent = bench.add("urgent", 1, priority=-1, max_tokens=1)  # fits into what the preemption leaves over
    schedule = bench.step()
    assert schedule.preempted == (c,)
    assert bench.cache.pool.num_free == 1
    assert schedule.admitted == ()
    assert bench.step().admitted == (urgent,)


@pytest.mark.behaviour(16, 33, 40, 41)
def test_a_preempted_request_keeps_row_and_tokens_and_computes_them_all_again() -> None:
    bench, (a, b, c) = out_of_blocks()
    row = c.row
    bench.step()
    known = bench.rows.num_tokens[row]
    tokens = bench.rows.token_ids[row, :known].copy()
    assert (c.row, bench.rows.requests[row]) == (row, c)
    bench.scheduler.remove(a)
    schedule = bench.step()
    assert schedule.admitted == (c,)
    where = schedule.rows.tolist().index(row)
    assert (schedule.num_computed[where], schedule.num_scheduled[where]) == (0, known)
    assert (bench.rows.token_ids[row, :known] == tokens).all()
    assert (c.row, c.status, b.status) == (row, Status.RUNNING, Status.RUNNING)


def test_a_preempted_request_resumes_from_its_own_cached_blocks_if_they_are_still_there() -> None:
    bench = Bench(num_blocks=5, max_model_len=16)
    a, b = bench.add("a", 7, max_tokens=9), bench.add("b", 9, max_tokens=7)
    while not b.metrics.num_preemptions:
        bench.step()
    bench.scheduler.remove(a)
    schedule = bench.step()
    assert schedule.admitted == (b,)
    assert schedule.num_computed.tolist() == [8]
    assert b.metrics.num_cached_tokens == 0  # counts what the first admission found


@pytest.mark.behaviour(45)
def test_the_lowest_free_row_is_taken_first() -> None:
    bench = Bench()
    requests = [bench.add(name, 2, max_tokens=20) for name in "abcd"]
    bench.step()
    assert [r.row for r in requests] == [0, 1, 2, 3]
    for r in (requests[2], requests[0], requests[3]):
        bench.scheduler.remove(r)
        assert r.row == -1
    later = [bench.add(name, 2, max_tokens=20) for name in "ef"]
    bench.step()
    assert [r.row for r in later] == [0, 2]


@pytest.mark.behaviour(31)
def test_an_id_that_ends_and_comes_again_between_two_steps_is_a_new_request() -> None:
    bench = Bench()
    old = bench.add("same", [1, 2, 3, 4, 5], max_tokens=20)
    bench.step()
    bench.scheduler.remove(old)
    new = bench.add("same", [9, 8, 7], max_tokens=20)
    schedule = bench.step()
    assert (old.status, old.row) == (Status.FINISHED, -1)
    assert schedule.admitted == (new,)
    assert (schedule.num_computed.tolist(), schedule.num_scheduled.tolist()) == ([0], [3])
    assert bench.rows.token_ids[new.row, :4].tolist() == [9, 8, 7, 7]
    assert bench.rows.num_tokens[new.row] == 4


@pytest.mark.parametrize("status", [Status.WAITING, Status.RUNNING, Status.PREEMPTED])
def test_a_request_can_be_removed_wherever_it_stands(status: Status) -> None:
    bench, (a, b, c) = out_of_blocks()
    bench.step()
    waiting = bench.add("waiting", 3)
    victim = {Status.WAITING: waiting, Status.RUNNING: a, Status.PREEMPTED: c}[status]
    assert victim.status is status
    bench.scheduler.remove(victim)
    check_integrity(bench.scheduler)
    assert (victim.row, victim.status) == (-1, Status.FINISHED)
    for other in {a, b, c, waiting} - {victim}:
        bench.scheduler.remove(other)
    check_integrity(bench.scheduler)
    assert bench.rows.num_free == 4
    assert bench.cache.pool.num_free == 6
    assert bench.scheduler.num_waiting == 0
    assert bench.step().num_tokens == 0


def test_a_request_that_does_not_fit_yet_takes_nothing_while_it_waits() -> None:
    bench = Bench(num_blocks=3, max_model_len=12, prefix_caching=False)
    bench.add("a", 8, max_tokens=2)
    big = bench.add("big", 8, max_tokens=2)
    bench.step()
    assert (big.status, big.row) == (Status.WAITING, -1)
    assert bench.cache.pool.num_free == 1
    assert bench.rows.num_free == 3


@pytest.mark.behaviour(31)
def test_a_row_that_is_not_held_cannot_be_released() -> None:
    rows = RequestTable(2, 8)
    first, second = request("a", [1]), request("b", [2])
    row = rows.admit(first, 0)
    with pytest.raises(IntegrityError, match="'b'"):
        rows.release(second)
    second.row = row
    with pytest.raises(IntegrityError, match="row 0"):
        rows.release(second)
    rows.release(first)
    with pytest.raises(IntegrityError):
        rows.release(first)


@pytest.mark.behaviour(18, 39)
def test_a_row_forgets_the_request_before_it() -> None:
    rows = RequestTable(1, 16)
    first = request(
        "a",
        [1, 2, 3],
        temperature=0.3,
        top_k=5,
        top_p=0.5,
        seed=3,
        logprobs=2,
        prompt_logprobs=1,
        ignore_eos=True,
        stop_token_ids=[4],
        min_tokens=2,
    )
    rows.admit(first, 0)
    rows.num_computed_tokens[0] = 3
    rows.log_floor[0] = -1
    rows.release(first)
    rows.admit(request("b", [9]), 77)
    fresh = RequestTable(1, 16)
    fresh.admit(request("b", [9]), 77)
    for name, value in vars(rows).items():
        if isinstance(value, np.ndarray) and name not in (
            "token_ids",
            "shown_token_ids",
            "generation",
            "stop_token_ids",
        ):
            assert np.array_equal(value, getattr(fresh, name)), name
    assert (rows.stop_token_ids == -1).all()  # as wide as the longest list so far


@pytest.mark.behaviour(39, 42, 151)
def test_new_blocks_are_appended_to_the_table_as_kernel_blocks() -> None:
    cache = cache_of(8, block_size=8, kernel_block_size=4)
    (group,) = cache.groups
    assert cache.try_grow(1, 9)
    assert group.blocks[1] == [1, 2]
    assert group.table[1].tolist() == [2, 3, 4, 5, 0, 0, 0, 0]
    assert cache.try_grow(1, 16)
    assert group.blocks[1] == [1, 2]
    assert cache.try_grow(1, 17)
    assert group.table[1].tolist() == [2, 3, 4, 5, 6, 7, 0, 0]
    assert not cache.try_grow_all(np.array([2, 3]), np.array([32, 9]))
    assert cache.pool.num_free == 5
    cache.release(1)
    assert not group.table.any()


def test_a_pool_must_hold_at_least_one_block() -> None:
    with pytest.raises(CapacityError, match="holds nothing"):
        cache_of(0)


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests against a tiny pool: whatever happens, the parts agree and everything comes back."""

    @initialize(
        num_blocks=st.integers(4, 9),
        max_requests=st.integers(1, 4),
        budget=st.integers(1, 14),
        chunked=st.booleans(),
        caching=st.booleans(),
    )
    def build(self, num_blocks: int, max_requests: int, budget: int, chunked: bool, caching: bool) -> None:
        self.bench = Bench(
            num_blocks=num_blocks,
            max_requests=max_requests,
            max_model_len=16,
            max_batched_tokens=budget,
            chunked_prefill=chunked,
            prefix_caching=caching,
        )
        self.live: dict[str, Request] = {}

    @rule(
        length=st.integers(1, 14),
        kind=st.integers(0, 1),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        scored=st.booleans(),
    )
    def add(self, length: int, kind: int, max_tokens: int, priority: int, scored: bool) -> None:
        if not self.bench.chunked_prefill and length > self.bench.max_batched_tokens:
            return
        prompt = [kind * 100 + i for i in range(length)]  # prefixes of two texts, so that hits are common
        name = f"r{self.bench.arrivals}"
        self.live[name] = self.bench.add(
            name, prompt, priority=priority, max_tokens=max_tokens, prompt_logprobs=0 if scored else None
        )

    @rule(token=st.integers(0, 1), times=st.integers(1, 3))
    def step(self, token: int, times: int) -> None:
        for _ in range(times):
            before = {name: self.progress(r) for name, r in self.live.items()}
            schedule = self.bench.step(lambda _: token)
            assert schedule.num_tokens <= self.bench.max_batched_tokens
            assert (schedule.num_scheduled >= 1).all()
            assert not (schedule.admitted and schedule.preempted)
            assert (np.diff((schedule.num_scheduled > 1).astype(int)) >= 0).all()
            self.drop_finished()
            if before:
                assert schedule.num_tokens > 0, "there are requests, and the step computed nothing"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.bench.scheduler.remove(self.live.pop(name))

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "bench"):
            return
        check_integrity(self.bench.scheduler)
        running = self.bench.scheduler.running
        assert [r.order for r in running] == sorted(r.order for r in running)
        for r in self.live.values():
            if r.row >= 0:
                known = self.bench.rows.num_prompt_tokens[r.row]
                assert self.bench.rows.token_ids[r.row, :known].tolist() == r.prompt_token_ids

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _ in range(2000):
            if not self.live:
                break
            self.bench.step()
            self.drop_finished()
        assert not self.live, "the scheduler makes no progress"
        bench = self.bench
        assert bench.scheduler.num_waiting == 0
        assert bench.rows.num_free == bench.max_requests
        assert bench.cache.pool.num_free == bench.num_blocks

    def progress(self, r: Request) -> int:
        return int(self.bench.rows.num_computed_tokens[r.row]) if r.row >= 0 else -1

    def drop_finished(self) -> None:
        for name in [name for name, r in self.live.items() if r.finished]:
            r = self.live.pop(name)
            limit = min(16 - len(r.prompt_token_ids), r.params.max_tokens or 16)
            assert len(r.output_token_ids) == limit


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


@pytest.mark.parametrize("leaves", [False, True])
def test_full_blocks_are_hashed_together_and_found_before_by_who_looks(*, leaves: bool) -> None:
    bench = Bench(max_model_len=64, num_blocks=40, max_batched_tokens=64)
    first = bench.add("first", 6, max_tokens=12 if leaves else 50)
    for _ in range(12):
        bench.step()
    tokens = bench.rows.token_ids[0, :17].tolist()  # 4 blocks, fewer than are hashed at a time
    if not leaves:
        assert len(first.block_hashes) == 1  # of its prompt
        assert bench.cache.pool.lookup(0, first.block_hashes[0]) is not None
        for _ in range(16):  # 34 computed tokens, seven blocks behind that of the prompt
            bench.step()
        assert len(first.block_hashes) == 1
        for _ in range(4):
            bench.step()
        assert len(first.block_hashes) == 9
        assert all(bench.cache.pool.lookup(0, one) is not None for one in first.block_hashes)
        for _ in range(8):  # two more, that nobody has asked for
            bench.step()
        assert len(first.block_hashes) == 9
        tokens = bench.rows.token_ids[0, :41].tolist()
    second = bench.add("second", [*tokens, 5], max_tokens=3)
    bench.step()
    assert second.metrics.num_cached_tokens == (len(tokens) // 4) * 4


def test_running_requests_get_the_blocks_of_the_next_steps_together_where_there_are_plenty() -> None:
    def versions(num_blocks: int) -> list[int]:
        bench = Bench(num_blocks=num_blocks, max_model_len=64, max_batched_tokens=64)
        for index, name in enumerate("abcd"):
            bench.add(name, 5 + index, max_tokens=20)
        bench.step()
        changes = []
        for _ in range(16):
            before = bench.cache.groups[0].versions.copy()
            bench.step()
            changes.append(int((bench.cache.groups[0].versions != before).sum()))
        return changes

    plenty, scarce = versions(100), versions(15)  # never a quarter of the pool left
    assert set(plenty) == {0, 4}
    assert scarce[:4] == [1] * 4  # each in the step that needs it


def test_a_request_near_its_end_gets_no_block_that_it_will_not_fill() -> None:
    bench = Bench(num_blocks=100, max_model_len=64, max_batched_tokens=64)
    bench.add("long", 4, max_tokens=30)
    ends = bench.add("ends", 7, max_tokens=2)
    bench.step()
    assert [len(blocks) for blocks in bench.cache.groups[0].blocks[:2]] == [1, 2]
    bench.scheduler.schedule()
    assert ends.row == 1
    assert [len(blocks) for blocks in bench.cache.groups[0].blocks[:2]] == [3, 2]  # for 5 + 4 tokens, and for 8
