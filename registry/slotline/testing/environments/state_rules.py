"""Random requests for the rules of a spec of states."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import fields, frozen

from slotline.registry.contracts.kv_spec import UNDIVIDED
from slotline.testing.check import Failed
from slotline.testing.environments.state_spec import Held

Int = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@frozen(eq=False)
class Requests:
    """Requests, one for each entry of the arrays, all [n] int64 (see `StateSpec`)."""

    computed: Int
    ends: Int
    last: Int
    branch: Int

    def describe(self, index: Any) -> str:
        """Return one request in a few words, for messages."""
        last, branch = (_place(int(values[index])) for values in (self.last, self.branch))
        return f"computed {self.computed[index]}, ends {self.ends[index]}, last {last}, branch {branch}"

    def one(self, index: int) -> Requests:
        """Return one request."""
        return Requests(*(getattr(self, item.name)[index : index + 1].copy() for item in fields(Requests)))


def _place(number: int) -> str:
    return "UNDIVIDED" if number == UNDIVIDED else str(number)


def requests_of(held: Held, rng: Random, count: int = 300, *, divisible: bool | None = None) -> Requests:
    """Return random requests, most of them at the edges of units and intervals.

    Args:
        held: the spec.
        rng: generator of the requests.
        count: number of requests.
        divisible: True if their tokens may be divided over steps. None for some of both.
    """
    drawn = [_request(held, rng, rng.random() < 0.8 if divisible is None else divisible) for _ in range(count)]
    columns = zip(*drawn, strict=True)
    return Requests(*(np.array(column, np.int64) for column in columns))


def _request(held: Held, rng: Random, divisible: bool) -> tuple[int, int, int, int]:
    longest = held.context.max_model_len
    computed = min(_near(held, rng), longest - 1)
    ends = min(computed + max(1, _near(held, rng)), longest)
    if not divisible:
        return computed, ends, UNDIVIDED, UNDIVIDED
    around = rng.choice((computed, ends, rng.randrange(longest)))
    last = max(0, around // held.unit + rng.randint(-1, 1)) * held.unit
    branch = min(last, max(0, rng.choice((computed, ends, last)) // held.unit + rng.randint(-1, 1)) * held.unit)
    return computed, ends, last, branch


def _near(held: Held, rng: Random) -> int:
    """Return a number of tokens, with probability 3/4 at or next to a multiple of the unit or of the interval."""
    longest = held.context.max_model_len
    step = rng.choice((held.unit, min(int(held.spec.interval), longest), 1))
    return min(max(0, step * rng.randrange(longest // step + 1) + rng.randint(-1, 1)), longest)


def stops(held: Held, asked: Requests) -> Int:
    """Return the answer of `stops` for copies of the requests.

    Raises:
        Failed: if it is not one int64 for each request.
    """
    arrays = (asked.computed.copy(), asked.ends.copy(), asked.last.copy(), asked.branch.copy())
    found: Int = _of_form("stops", held.spec.stops(*arrays), len(asked.computed), np.dtype(np.int64))
    return found


def keeps(held: Held, computed: Int, asked: Requests) -> Mask:
    """Return the answer of `keeps` for requests that have computed `computed` tokens.

    Raises:
        Failed: if it is not one bool for each request.
    """
    answer = held.spec.keeps(computed.copy(), asked.last.copy(), asked.branch.copy())
    found: Mask = _of_form("keeps", answer, len(computed), np.dtype(np.bool_))
    return found


def rolls_back(held: Held, counts: Int, accepted: Int) -> Mask:
    """Return the answer of `rolls_back`.

    Raises:
        Failed: if it is not one bool for each request.
    """
    answer = held.spec.rolls_back(counts.copy(), accepted.copy())
    found: Mask = _of_form("rolls_back", answer, len(counts), np.dtype(np.bool_))
    return found


def _of_form(name: str, found: Any, count: int, dtype: np.dtype[Any]) -> Any:
    if not isinstance(found, np.ndarray) or found.shape != (count,) or found.dtype != dtype:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else repr(found)
        raise Failed(f"{name} returned {what}, wanted an array of {dtype} [{count}]")
    return found
