"""The likeliest token where it is not plain: ties, NaN, infinities."""

from __future__ import annotations

import numpy as np

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.device import Array, DeviceUnderTest, nan_rows, same
from slotline.testing.oracles import device as oracle

VOCABULARIES = (3, 257, 5000)


def hostile_rows(rng: np.random.Generator, vocab_size: int, *, nan: bool) -> Array:
    """Return logits [n, vocab_size] float32 with ties and infinities, or with NaN."""
    found = rng.normal(size=(12, vocab_size)).astype(np.float32)
    found[0], found[1], found[2] = 0, -np.inf, -1e30
    found[3, rng.integers(vocab_size, size=4)] = 50
    found[4, [0, -1]] = 50
    found[5, -1] = 50
    found[6, vocab_size // 2 :] = np.inf
    found[7, 1:] = -np.inf
    found[8] = np.float32(-np.inf)
    found[8, -1] = -3e38
    if nan:
        found = np.where(np.isinf(found) & (found > 0), 1, found).astype(np.float32)
        found[9, 0], found[10, -1], found[11] = np.nan, np.nan, np.nan
        found[3, rng.integers(vocab_size)] = np.nan
        found[1, vocab_size // 2] = np.nan
    return found


@check(
    Kind.DEVICE,
    "device.choice.ties",
    Level.HOSTILE,
    cases=lambda _: ({"vocab_size": size} for size in VOCABULARIES),
    cost=0.02,
)
def choice_ties(run: Run) -> None:
    """Of equal largest logits the first is taken, infinite ones too, in rows of minus infinities the first token."""
    _expect(run, nan=False)


@check(
    Kind.DEVICE,
    "device.choice.nan",
    Level.HOSTILE,
    cases=lambda _: ({"vocab_size": size} for size in VOCABULARIES),
    cost=0.02,
)
def choice_nan(run: Run) -> None:
    """The first NaN of a row is taken as its largest logit, and `argmax_checked` names the rows that hold one."""
    _expect(run, nan=True)


def _expect(run: Run, *, nan: bool) -> None:
    under_test = DeviceUnderTest(run)
    logits = hostile_rows(under_test.rng, run["vocab_size"], nan=nan)
    expected = oracle.argmax(logits)["tokens"]
    with under_test.at_work():
        tensor = under_test.put(logits)
        found = under_test.ops.argmax(tensor)
        checked, holds_nan = under_test.ops.argmax_checked(tensor)
    same(expected, under_test.host(found), "argmax")
    same(expected, under_test.host(checked), "the tokens of argmax_checked")
    if holds_nan is None:
        if nan:
            raise Failed("argmax_checked says that no row holds NaN, and some do")
        return
    same(nan_rows(logits), under_test.host(holds_nan), "the rows that hold NaN, of argmax_checked")
