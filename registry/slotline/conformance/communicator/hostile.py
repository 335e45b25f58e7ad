"""L2 of communicators: late ranks, several exchanges and groups at once, kept results, strange neighbours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.communicator import (
    Call,
    GroupUnderTest,
    by_size,
    check_calls,
    compare_call,
    dtypes_of,
    everywhere,
    exchanged,
    random_tensors,
    same_bits,
    sent,
)
from slotline.testing.environments.communicator_rank import Joined

LATE = 0.6
"""Seconds by which a rank is late."""


def _exchange_late(joined: Joined, late: float, exchanges: Sequence[Any], sums: torch.Tensor) -> list[torch.Tensor]:
    """Start two exchanges and finish them in the other order, with a sum between."""
    time.sleep(late)
    started = [joined.communicator.all_to_all(x.to(joined.device), list(to), list(of)) for x, to, of in exchanges]
    second = started[1].finish()
    between = joined.communicator.all_reduce(sums.to(joined.device))
    return [started[0].finish(), second, between]


@check(Kind.COMMUNICATOR, "communicator.all_to_all.late", Level.HOSTILE, cases=by_size, cost=0.6)
def all_to_all_late(run: Run) -> None:
    """Exchanges that a late rank joins are whole when they are finished, in any order, with a sum between."""
    size, rng = run["ranks"], run.rng
    calls = []
    for salt in range(2):
        rows = [[rng.randint(1, 4) for _ in range(size)] for _ in range(size)]
        xs = [random_tensors(run, 1, (sum(row), 3), "float32", 9 * salt + i)[0] for i, row in enumerate(rows)]
        calls.append(exchanged(xs, rows))
    dtype = dtypes_of(run.subject)[0]
    calls.append(everywhere("all_reduce", random_tensors(run, size, (33,), dtype, 77)))
    given = [[arguments(call, rank) for call in calls[:2]] for rank in range(size)]
    sums = [arguments(calls[2], rank)[0] for rank in range(size)]
    for last in range(size):
        late = [LATE if rank == last else 0.0 for rank in range(size)]
        found = GroupUnderTest(run, size).perform(_exchange_late, late, given, sums)
        for number, call in enumerate(calls):
            compare_call(run, call, [results[number] for results in found])


def arguments(call: Call, rank: int) -> tuple[Any, ...]:
    """Return a rank's arguments of a call that all ranks make."""
    given = call.given[rank]
    assert given is not None
    return given[1]


@check(Kind.COMMUNICATOR, "communicator.send.order", Level.HOSTILE, cases=by_size, cost=0.15)
def send_order(run: Run) -> None:
    """Tensors arrive in the order in which they were sent, and from the rank that is asked, not the first."""
    size, calls = run["ranks"], []
    for number in range(4):
        x = random_tensors(run, 1, (5,), "float32", number)[0]
        calls.append(sent(x, 0, size - 1, size))
    if size > 2:
        early, late = (random_tensors(run, 1, (5,), "float32", 20 + i)[0] for i in range(2))
        given: list[list[Any]] = [[("send", (early, 2))], [("send", (late, 2))], []]
        given[2] = [("receive", (torch.zeros(5), 1)), ("receive", (torch.zeros(5), 0))]
        found = GroupUnderTest(run, size).perform(_send_late, [0.0, LATE, 0.0], given)
        if not same_bits(found[2][0], late) or not same_bits(found[2][1], early):
            raise Failed("rank 2 did not get the tensor of the rank that it received from")
    check_calls(GroupUnderTest(run, size), calls)


def _send_late(joined: Joined, late: float, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    time.sleep(late)
    found = [getattr(joined.communicator, name)(x.to(joined.device), *rest) for name, (x, *rest) in calls]
    joined.wait()
    joined.meet()
    return found


def _in_groups(joined: Joined, calls: Sequence[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
    """Make calls in several groups. All results are read at the end."""
    found = []
    for number, name, (x, *rest) in calls:
        group = joined.groups[number]
        assert group is not None
        found.append((number, getattr(group, name)(x.to(joined.device), *rest), group.rank, group.size))
    joined.wait()
    return found


@check(Kind.COMMUNICATOR, "communicator.groups.apart", Level.HOSTILE, cases=by_size, cost=0.2)
def groups_apart(run: Run) -> None:
    """Several groups of the same and of other ranks do not disturb each other, and each has its own places."""
    size = run["ranks"]
    everyone = tuple(range(size))
    groups = (everyone, everyone, *(((0, size - 1),) if size > 2 else ()))
    calls: list[tuple[int, Call]] = []
    for number in (*range(len(groups)), 0, 1):
        members, salt = groups[number], 31 * len(calls)
        for name in ("all_gather", "all_reduce", "broadcast"):
            rest = (len(members) - 1,) if name == "broadcast" else ()
            xs = random_tensors(run, len(members), (6,), dtypes_of(run.subject)[0], salt)
            calls.append((number, everywhere(name, xs, *rest)))
    given: list[list[Any]] = [[] for _ in everyone]
    for number, call in calls:
        for place, rank in enumerate(groups[number]):
            given[rank].append((number, call.given[place][0], call.given[place][1]))  # type: ignore[index]
    found = GroupUnderTest(run, size, groups=groups).perform(_in_groups, given)
    for number, call in calls:
        results = [found[rank].pop(0) for rank in groups[number]]
        for place, (_, _, rank, count) in enumerate(results):
            if (rank, count) != (place, len(groups[number])):
                raise Failed(f"group {groups[number]}: place {place} has rank {rank} of {count}")
        compare_call(run, call, [result[1] for result in results])


@check(Kind.COMMUNICATOR, "communicator.results.kept", Level.HOSTILE, cases=by_size, cost=0.15)
def results_kept(run: Run) -> None:
    """Later calls leave earlier results as they are."""
    size, dtype, calls = run["ranks"], dtypes_of(run.subject)[0], []
    for salt in range(3):
        xs = random_tensors(run, size, (2 * size, 4), dtype, 3 * salt)
        calls += [everywhere("all_reduce", xs), everywhere("all_gather", xs), everywhere("reduce_scatter", xs)]
        calls += [everywhere("broadcast", xs, 1), exchanged(xs, [[2] * size] * size), sent(xs[0], 0, 1, size)]
    check_calls(GroupUnderTest(run, size), calls)


@check(Kind.COMMUNICATOR, "communicator.all_reduce.special", Level.HOSTILE, cases=by_size, cost=0.12)
def all_reduce_special(run: Run) -> None:
    """NaN and infinity of one rank are in the sums of their own places, and leave the other numbers as they are."""
    size, calls = run["ranks"], []
    for number, dtype in enumerate(dtypes_of(run.subject)):
        xs = random_tensors(run, size, (67,), dtype, number)
        xs[0][3], xs[1][5], xs[0][9], xs[1][9] = float("nan"), float("inf"), float("inf"), -float("inf")
        xs[size - 1][66] = -float("inf")
        calls.append(everywhere("all_reduce", xs))
    check_calls(GroupUnderTest(run, size), calls)


@check(
    Kind.COMMUNICATOR,
    "communicator.all_reduce.invariant",
    Level.HOSTILE,
    needs={"batch_invariant": True},
    cases=by_size,
    cost=0.3,
)
def all_reduce_invariant(run: Run) -> None:
    """A number's sum has the same bits alone, at any place, beside any others, in any shape and by `reduce_scatter`."""
    size = run["ranks"]
    for number, dtype in enumerate(dtypes_of(run.subject)):
        xs = random_tensors(run, size, (4096,), dtype, number)
        rows = [[x.clone() for x in xs]]
        rows += [[x[start:stop].clone() for x in xs] for start, stop in ((0, 1), (4095, 4096), (7, 1031), (2048, 4096))]
        rows += [[x.view(64, 64).clone() for x in xs], [x.flip(0) for x in xs]]
        rows += [[torch.cat([x[:5], torch.full((2500,), 1e3, dtype=x.dtype)]) for x in xs]]
        calls = [everywhere("all_reduce", row) for row in rows]
        group = GroupUnderTest(run, size, batch_invariant=True)
        check_calls(group, calls)
        found = group.perform(_sums, [[call.given[rank] for call in calls] for rank in range(size)])[0]
        whole, first, last, middle, half, square, turned, beside = found
        pairs = (
            ("one number", first, whole[:1]),
            ("the last number", last, whole[4095:]),
            ("a part from an odd place on", middle, whole[7:1031]),
            ("the second half", half, whole[2048:]),
            ("another shape", square.reshape(-1), whole),
            ("the order turned around", turned.flip(0), whole),
            ("other numbers beside", beside[:5], whole[:5]),
        )
        for what, one, other in pairs:
            if not same_bits(one.contiguous(), other.contiguous()):
                raise Failed(f"{what} ({dtype}): other bits than in the whole tensor")
        scattered = torch.cat(group.perform(_part_of_sum, [x[: 1024 * size].clone() for x in xs]))
        if not same_bits(scattered, whole[: 1024 * size].contiguous()):
            raise Failed(f"reduce_scatter ({dtype}): other bits than all_reduce gives")


def _part_of_sum(joined: Joined, x: torch.Tensor) -> torch.Tensor:
    return joined.communicator.reduce_scatter(x.to(joined.device)).cpu()


def _sums(joined: Joined, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[torch.Tensor]:
    return [joined.communicator.all_reduce(x.to(joined.device)) for _, (x,) in calls]
