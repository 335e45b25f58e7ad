"""Sizes where kernels break, found by a rule, and samples of shapes that fit a stated time.

Tiles, masks and buffers have sizes that are powers of two, so a kernel that is right up to one is often wrong behind
it. `behind` gives the power, the first size behind it and the size in the middle to the next. `sampled` combines values
of several axes so that each value and then each pair of values comes early, and ends when the time is spent. The time
is estimated from the amount of arithmetic, not measured: the cases are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from types import MappingProxyType
from typing import Any

from slotline.testing.check import Level

SECONDS: Mapping[Level, float] = MappingProxyType({Level.NUMERICS: 20.0, Level.HOSTILE: 4.0})
"""Time that all cases over such sizes may take of one level, of one plugin of the slow reference, on one core."""
MULTIPLICATIONS_PER_SECOND = 4e8
"""Of a check as a whole: the plugin's step, the exact answer and the plain one beside it, at a slow plugin's pace."""
SECONDS_PER_SHAPE = 1.0
"""For what a new shape of a layer costs in any case: a plugin may compile a kernel for it."""


def behind(maximum: int, *, start: int = 1, step: int = 1) -> tuple[int, ...]:
    """Return powers of two from `start` on with two sizes behind each, up to `maximum`.

    Args:
        maximum: the largest size that is declared, or that a check can afford. It is itself the last one.
        start: a power of two. Sizes from it on are returned.
        step: sizes are multiples of it.

    Raises:
        ValueError: if `start` or `step` is below 1.
    """
    if start < 1 or step < 1:
        raise ValueError(f"start is {start} and step is {step}, expected 1 or more")
    found: list[int] = []
    power = start
    while power <= maximum:
        found += [power, power // step * step + step, -(-(power + power // 2) // step) * step]
        power *= 2
    kept = {size for size in (*found, maximum // step * step) if start <= size <= maximum and size % step == 0}
    return tuple(sorted(kept))


def sampled(
    axes: Mapping[str, Sequence[Any]],
    *,
    cost: Callable[[Mapping[str, Any]], float],
    budget: float,
    allowed: Callable[[Mapping[str, Any]], bool] = lambda row: True,
    whole: bool = False,
) -> tuple[dict[str, Any], ...]:
    """Return combinations of values, one of each axis, in the order in which they add the most new pairs.

    A row takes, axis after axis, the value that makes the most pairs which no row had yet, and among these the value
    that fewest rows had: the in-parameter-order greedy of Cohen and others (1997, AETG), without its random part.

    Args:
        axes: name -> values.
        cost: estimated seconds of a row.
        budget: rows end before their costs are more than this. There is at least one.
        allowed: False for combinations that cannot be.
        whole: True to go on until no pair that is allowed is new, whatever it costs.
    """
    rows: list[dict[str, Any]] = []
    spent = 0.0
    for row in _rows(axes, allowed):
        spent += cost(row)
        if rows and spent > budget and not whole:
            break
        rows.append(row)
    return tuple(rows)


def _rows(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """Yield rows until all pairs that can be had are there."""
    names = list(axes)
    left = {
        (a, x, b, y) for a, b in combinations(names, 2) for x, y in product(range(len(axes[a])), range(len(axes[b])))
    }
    used = {(name, index): 0 for name in names for index in range(len(axes[name]))}
    if len(names) < 2:
        yield from ({name: value} for name in names for value in axes[name] if allowed({name: value}))
        return
    while left:
        seed = min(left, key=lambda pair: (used[pair[0], pair[1]] + used[pair[2], pair[3]], _place(pair, names)))
        left.discard(seed)
        row = _completed({seed[0]: seed[1], seed[2]: seed[3]}, axes, left, used, allowed)
        if row is None:
            continue
        for name, index in row.items():
            used[name, index] += 1
        left -= _pairs(row, names)
        yield {name: axes[name][row[name]] for name in names}


def _place(pair: tuple[str, int, str, int], names: Sequence[str]) -> tuple[int, int, int, int]:
    return names.index(pair[0]), pair[1], names.index(pair[2]), pair[3]


def _completed(
    row: dict[str, int],
    axes: Mapping[str, Sequence[Any]],
    left: set[tuple[str, int, str, int]],
    used: Mapping[tuple[str, int], int],
    allowed: Callable[[Mapping[str, Any]], bool],
) -> dict[str, int] | None:
    """Return a row with an index for each axis that holds two given ones, or None if none is allowed."""
    names = list(axes)

    def fits(some: Mapping[str, int]) -> bool:
        return allowed({name: axes[name][index] for name, index in some.items()})

    if not fits(row):
        return None
    for name in names:
        if name in row:
            continue

        def worth(index: int, name: str = name) -> tuple[int, int, int]:
            new = len(_pairs({**row, name: index}, names) & left)
            return (-new, used[name, index], index)

        choices = [index for index in range(len(axes[name])) if fits({**row, name: index})]
        if not choices:
            return None
        row[name] = min(choices, key=worth)
    return row


def _pairs(row: Mapping[str, int], names: Sequence[str]) -> set[tuple[str, int, str, int]]:
    kept = [name for name in names if name in row]
    return {(a, row[a], b, row[b]) for a, b in combinations(kept, 2)}


def seconds(multiplications: float, shapes: int = 0) -> float:
    """Return the estimated time of a case from its multiplications and the number of new shapes of a layer."""
    return multiplications / MULTIPLICATIONS_PER_SECOND + shapes * SECONDS_PER_SHAPE


def declared(offer: Any, maximum: int, *, start: int = 1, step: int = 1, more: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the sizes of `behind`, and of `more`, that a capability such as a `Range` covers.

    Args:
        offer: the capability.
        maximum: the end where none is declared.
        start, step: as in `behind`. A declared step counts if it is larger.
        more: other sizes.
    """
    top = getattr(offer, "maximum", None)
    ends = (*getattr(offer, "extra", ()), *((top,) if top is not None and top <= maximum else ()))
    step = max(step, getattr(offer, "step", 1))
    found = {*behind(maximum, start=start, step=step), *more, *(end for end in ends if start <= end <= maximum)}
    return tuple(size for size in sorted(found) if offer.refusal(size) is None)
