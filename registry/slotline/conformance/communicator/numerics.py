"""L1 of communicators: each collective in groups of two and three ranks, against an oracle that has all tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.communicator import (
    GroupUnderTest,
    by_size,
    by_size_and_dtype,
    check_calls,
    everywhere,
    exchanged,
    random_tensors,
    sent,
    sizes_of,
)
from slotline.testing.environments.communicator_rank import Joined
from slotline.testing.subject import Subject

SHAPES = ((7,), (1,), (), (3, 5), (64, 130), (1023,), (2, 3, 4), (0,), (4, 0))


def _place(joined: Joined) -> tuple[int, int]:
    return joined.communicator.rank, joined.communicator.size


@check(Kind.COMMUNICATOR, "communicator.place", Level.NUMERICS, cases=by_size, cost=0.1)
def place(run: Run) -> None:
    """Each rank knows its place and the number of ranks."""
    found = GroupUnderTest(run, run["ranks"]).perform(_place)
    if found != [(rank, run["ranks"]) for rank in range(run["ranks"])]:
        raise Failed(f"rank and size on the ranks in order are {found}")


@check(Kind.COMMUNICATOR, "communicator.all_reduce.values", Level.NUMERICS, cases=by_size_and_dtype, cost=0.11)
def all_reduce_values(run: Run) -> None:
    """Sums of any shape, odd, empty and without dimensions, are rounded as they may be, alike on all ranks."""
    size, dtype = run["ranks"], run["dtype"]
    tensors = [random_tensors(run, size, shape, dtype, salt) for salt, shape in enumerate(SHAPES)]
    check_calls(GroupUnderTest(run, size), [everywhere("all_reduce", xs) for xs in tensors])


@check(Kind.COMMUNICATOR, "communicator.all_reduce.large", Level.NUMERICS, cases=by_size_and_dtype, cost=0.15)
def all_reduce_large(run: Run) -> None:
    """Sums of a hundred thousand numbers have the same bits on all ranks, the last number included."""
    size, dtype = run["ranks"], run["dtype"]
    xs = random_tensors(run, size, (131, 773), dtype)
    check_calls(GroupUnderTest(run, size), [everywhere("all_reduce", xs)] * 2)


@check(Kind.COMMUNICATOR, "communicator.all_gather.dims", Level.NUMERICS, cases=by_size, cost=0.12)
def all_gather_dims(run: Run) -> None:
    """Tensors are joined along each dimension, negative ones included, in order of the ranks."""
    size, calls = run["ranks"], []
    for salt, shape in enumerate(((5,), (3, 4), (2, 3, 5), (1, 1), (0, 3), (3, 0))):
        xs = random_tensors(run, size, shape, "float32", salt)
        calls += [everywhere("all_gather", xs, dim) for dim in range(-len(shape), len(shape))]
        calls.append(everywhere("all_gather", xs))
    check_calls(GroupUnderTest(run, size), calls)


@check(Kind.COMMUNICATOR, "communicator.reduce_scatter.values", Level.NUMERICS, cases=by_size_and_dtype, cost=0.12)
def reduce_scatter_values(run: Run) -> None:
    """Each rank gets its own part of the sum."""
    size, dtype = run["ranks"], run["dtype"]
    shapes = [(size,), (3 * size,), (2 * size, 5), (size, 3, 7), (0, 4), (41 * size, 129)]
    tensors = [random_tensors(run, size, shape, dtype, salt) for salt, shape in enumerate(shapes)]
    check_calls(GroupUnderTest(run, size), [everywhere("reduce_scatter", xs) for xs in tensors])


@check(Kind.COMMUNICATOR, "communicator.all_to_all.rows", Level.NUMERICS, cases=by_size, cost=0.12)
def all_to_all_rows(run: Run) -> None:
    """Ranks exchange unequal numbers of rows, none included, in order of the ranks."""
    size, rng, calls = run["ranks"], run.rng, []
    for salt, width in enumerate(((), (3,), (2, 5), (4,), (1,))):
        rows = [[rng.choice((0, 1, 2, 5)) for _ in range(size)] for _ in range(size)]
        if salt == 3:
            rows[0] = [0] * size  # gives nothing
            rows = [[0 if to == size - 1 else n for to, n in enumerate(row)] for row in rows]  # gets nothing
        if salt == 4:
            rows = [[0] * size for _ in range(size)]
        xs = [random_tensors(run, 1, (sum(row), *width), "float32", 9 * salt + i)[0] for i, row in enumerate(rows)]
        calls.append(exchanged(xs, rows))
    check_calls(GroupUnderTest(run, size), calls)


@check(Kind.COMMUNICATOR, "communicator.broadcast.sources", Level.NUMERICS, cases=by_size, cost=0.1)
def broadcast_sources(run: Run) -> None:
    """All ranks get the tensor of any one of them."""
    size = run["ranks"]
    calls = [
        everywhere("broadcast", random_tensors(run, size, shape, "float32", 7 * source), source)
        for source in range(size)
        for shape in ((3, 5), (), (0,))
    ]
    calls.append(everywhere("broadcast", random_tensors(run, size, (6,), "float32", 99)))
    check_calls(GroupUnderTest(run, size), calls)


@check(Kind.COMMUNICATOR, "communicator.send.pairs", Level.NUMERICS, cases=by_size, cost=0.1)
def send_pairs(run: Run) -> None:
    """A tensor goes from each rank to each other."""
    size, calls = run["ranks"], []
    for source in range(size):
        for to in range(size):
            if source != to:
                x = random_tensors(run, 1, (4, 3), "float32", 5 * source + to)[0]
                calls.append(sent(x, source, to, size))
    check_calls(GroupUnderTest(run, size), calls)


def _any_dtype(subject: Subject) -> Iterable[Case]:
    size = sizes_of(subject)[0]
    names = ("int64", "int32", "uint8", "bool", "float64", "bfloat16", "float16", "float32")
    return [{"ranks": size, "dtype": name} for name in names]


@check(Kind.COMMUNICATOR, "communicator.moves.dtypes", Level.NUMERICS, cases=_any_dtype, cost=0.1)
def moves_dtypes(run: Run) -> None:
    """Tensors of any dtype are moved to the bit, those that are not added up included."""
    size, dtype = run["ranks"], run["dtype"]
    xs = random_tensors(run, size, (size * 2, 3), dtype)
    if xs[0].is_floating_point():
        for x in xs:
            x.view(-1)[:2] = torch.tensor([float("nan"), -0.0])
    rows = [[1, *[(size * 2 - 1 - (size - 2)) if to == 1 else 1 for to in range(1, size)]] for _ in range(size)]
    calls = [
        everywhere("all_gather", xs, 1),
        everywhere("broadcast", xs, 1),
        exchanged(xs, rows),
        sent(xs[0], 0, 1, size),
    ]
    check_calls(GroupUnderTest(run, size), calls)
