"""L3 of communicators: random sequences of all collectives."""

from __future__ import annotations

from random import Random

from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, Run, check
from slotline.testing.environments.communicator import (
    Call,
    GroupUnderTest,
    by_size,
    check_calls,
    dtypes_of,
    everywhere,
    exchanged,
    random_tensors,
    sent,
)

STEPS = 80


@check(Kind.COMMUNICATOR, "communicator.history.mixed", Level.STATEFUL, cases=by_size, explores=True, cost=0.5)
def history_mixed(run: Run) -> None:
    """Collectives of all sorts and sizes, one after the other, all give what they should."""
    size, rng = run["ranks"], run.rng
    check_calls(GroupUnderTest(run, size), [_some(run, rng, size, step) for step in range(STEPS)])


def _some(run: Run, rng: Random, size: int, step: int) -> Call:
    name = rng.choice(("all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"))
    dtype = rng.choice(dtypes_of(run.subject))
    if name == "all_to_all":
        rows = [[rng.choice((0, 1, 3, 8)) for _ in range(size)] for _ in range(size)]
        width = rng.randint(1, 9)
        return exchanged(
            [random_tensors(run, 1, (sum(row), width), dtype, 50 * step + i)[0] for i, row in enumerate(rows)], rows
        )
    shape = [rng.choice((1, 2, 7, 33)) * size, *(rng.randint(1, 40) for _ in range(rng.randint(0, 2)))]
    xs = random_tensors(run, size, shape, dtype, 50 * step)
    if name == "send":
        source, to = rng.sample(range(size), 2)
        return sent(xs[0], source, to, size)
    if name == "broadcast":
        return everywhere(name, xs, rng.randrange(size))
    if name == "all_gather":
        return everywhere(name, xs, rng.randrange(-len(shape), len(shape)))
    return everywhere(name, xs)
