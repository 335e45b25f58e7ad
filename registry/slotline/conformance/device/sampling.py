"""Draws: which token, from which logits, and on what it depends."""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve

from slotline.registry.contracts.device import Drawn
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.device import LAYOUTS, Array, DeviceUnderTest, Laid, nan_rows, same
from slotline.testing.environments.device_sampling import Rows, expect_final, expect_tokens

ROWS, VOCAB_SIZE = 24, 400
LIMITS = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_k_one": {"top_k": 1},
    "top_p": {"top_p": 7},
    "top_p_first": {"top_p": 1},
    "floor": {"floor": 6},
    "together": {"top_k": 9, "top_p": 4, "floor": 7},
}
"""For each case how many of the largest logits each limit leaves."""


def draw(
    under_test: DeviceUnderTest, rows: Rows, *, keep_final: bool = False, layout: str = "plain"
) -> tuple[Array, Drawn]:
    """Sample rows and return the tokens.

    Raises:
        Failed: if the answer has another form than the contract's, or the logits were written.
    """
    n, vocab_size = rows.logits.shape
    laid: Laid = under_test.lay(rows.logits, layout)
    with under_test.at_work():
        metadata = rows.metadata()
        found = under_test.ops.sample(laid.tensor, metadata, under_test.put(metadata.packed()), keep_final=keep_final)
    under_test.expect_tensor(found.tokens, (n,), torch.int64, "the tokens of sample")
    if keep_final:
        under_test.expect_tensor(found.final, (n, vocab_size), torch.float32, "the logits that were drawn from")
    if found.holds_nan is not None:
        under_test.expect_tensor(found.holds_nan, (n,), torch.bool, "the rows that hold NaN")
        same(nan_rows(rows.logits), under_test.host(found.holds_nan), "the rows that hold NaN, of sample")
    elif np.isnan(rows.logits).any():
        raise Failed("sample says that no row holds NaN, and some do")
    same(rows.logits, under_test.host(laid.tensor), "the logits after sample")
    if laid.touched_outside():
        raise Failed("sample wrote beside its logits")
    return under_test.host(found.tokens), found


@check(
    Kind.DEVICE,
    "device.sample.number",
    Level.NUMERICS,
    cases=lambda _: ({"temperature": value} for value in (1.0, 0.4, 2.5)),
    cost=0.03,
)
def sample_number(run: Run) -> None:
    """A draw is the token where the cumulative distribution passes the number of its seed and position."""
    under_test = DeviceUnderTest(run)
    rows = Rows.random(under_test.rng, ROWS, VOCAB_SIZE)
    rows = evolve(rows, temperature=np.full(ROWS, run["temperature"], np.float32))
    tokens, _ = draw(under_test, rows)
    expect_tokens(rows, tokens, "sample")


@check(
    Kind.DEVICE,
    "device.sample.limits",
    Level.NUMERICS,
    cases=lambda _: ({"limits": name} for name in LIMITS),
    cost=0.05,
)
def sample_limits(run: Run) -> None:
    """Temperature, floor, top-k and top-p act in this order, each to its last token, and leave the rest as it is."""
    under_test = DeviceUnderTest(run)
    rows = Rows.random(under_test.rng, ROWS, VOCAB_SIZE)
    rows = evolve(rows, temperature=under_test.rng.uniform(0.5, 1.5, ROWS).astype(np.float32))
    rows = rows.limited(**LIMITS[run["limits"]])
    tokens, drawn = draw(under_test, rows, keep_final=True)
    assert drawn.final is not None
    expect_final(rows, under_test.host(drawn.final), "sample")
    expect_tokens(rows, tokens, "sample")


@check(Kind.DEVICE, "device.sample.mixed", Level.NUMERICS, cost=0.05)
def sample_mixed(run: Run) -> None:
    """Rows of one step have parameters of their own: greedy ones beside ones with limits and ones without."""
    under_test = DeviceUnderTest(run)
    rows = mixed(under_test.rng, ROWS, VOCAB_SIZE)
    tokens, drawn = draw(under_test, rows, keep_final=True)
    assert drawn.final is not None
    expect_final(rows, under_test.host(drawn.final), "sample")
    expect_tokens(rows, tokens, "sample")


@check(Kind.DEVICE, "device.sample.alone", Level.HOSTILE, cost=0.05)
def sample_alone(run: Run) -> None:
    """A draw depends on its logits, parameters, seed and position alone: not on its row, nor on other rows."""
    under_test = DeviceUnderTest(run)
    rows = mixed(under_test.rng, ROWS, VOCAB_SIZE)
    together, _ = draw(under_test, rows)
    for _ in range(3):
        which = under_test.rng.permutation(ROWS)[: int(under_test.rng.integers(4, ROWS))]
        if not rows.temperature[which].any():
            continue
        tokens, _ = draw(under_test, rows.take(which))
        same(together[which], tokens, "draws of some of the rows in another order")
    others = evolve(rows, positions=rows.positions + 1)
    if np.array_equal(draw(under_test, others)[0], together):
        raise Failed("draws at the next positions are the same")


@check(
    Kind.DEVICE,
    "device.sample.layouts",
    Level.HOSTILE,
    cases=lambda _: ({"layout": layout} for layout in LAYOUTS),
    cost=0.05,
)
def sample_layouts(run: Run) -> None:
    """Logits that are a part of others give the same draws, and nothing beside them is read or written."""
    under_test = DeviceUnderTest(run)
    rows = mixed(under_test.rng, ROWS, VOCAB_SIZE)
    tokens, _ = draw(under_test, rows, layout=run["layout"])
    expect_tokens(rows, tokens, f"sample of {run['layout']} logits")


@check(
    Kind.DEVICE,
    "device.sample.sizes",
    Level.HOSTILE,
    cases=lambda _: ({"rows": rows, "vocab_size": size} for rows, size in ((1, 1), (2, 9), (1, 20_011), (70, 33))),
    cost=0.1,
)
def sample_sizes(run: Run) -> None:
    """One row, one token, many rows, and a large vocabulary that is a multiple of nothing are sampled alike."""
    under_test = DeviceUnderTest(run)
    rows = Rows.random(under_test.rng, run["rows"], run["vocab_size"])
    limits = ({}, {"top_k": 3}, {"top_p": 3}) if run["vocab_size"] > 3 else ({}, {"top_k": 1})
    for limit in limits:
        limited = rows.limited(**limit)
        tokens, _ = draw(under_test, limited)
        expect_tokens(limited, tokens, f"sample with {limit}")


@check(Kind.DEVICE, "device.sample.masked", Level.HOSTILE, cost=0.05)
def sample_masked(run: Run) -> None:
    """Tokens of minus infinity are never drawn, wherever the number lies."""
    under_test = DeviceUnderTest(run)
    rows = Rows.random(under_test.rng, ROWS, VOCAB_SIZE)
    logits = rows.logits.copy()
    for row in range(ROWS):
        left = under_test.rng.permutation(VOCAB_SIZE)[: 1 + row % 3]
        banned = np.setdiff1d(np.arange(VOCAB_SIZE), left)
        logits[row, banned] = -np.inf
    rows = evolve(rows, logits=logits)
    for limited in (rows, evolve(rows, top_k=np.full(ROWS, 20)), evolve(rows, top_p=np.full(ROWS, 0.999, np.float32))):
        tokens, _ = draw(under_test, limited)
        if not np.isfinite(logits[np.arange(ROWS), tokens]).all():
            raise Failed("a token of minus infinity was drawn")


@check(Kind.DEVICE, "device.sample.nan", Level.HOSTILE, cost=0.03)
def sample_nan(run: Run) -> None:
    """Rows that hold NaN are named, with and without limits, and the draws of the others are as without them."""
    under_test = DeviceUnderTest(run)
    clean = mixed(under_test.rng, ROWS, VOCAB_SIZE)
    logits, bad = clean.logits.copy(), np.arange(0, ROWS, 5)
    logits[bad, under_test.rng.integers(0, VOCAB_SIZE, len(bad))] = np.nan
    tokens, _ = draw(under_test, evolve(clean, logits=logits))
    good = np.setdiff1d(np.arange(ROWS), bad)
    expect_tokens(clean.take(good), tokens[good], "rows beside rows with NaN")
    if not ((tokens >= 0) & (tokens < VOCAB_SIZE)).all():
        raise Failed(f"rows with NaN drew {tokens[bad].tolist()}, which are no tokens")


def mixed(rng: np.random.Generator, n: int, vocab_size: int) -> Rows:
    """Return rows of which every fourth is greedy, and the others have top-k, top-p, or no limit."""
    rows = Rows.random(rng, n, vocab_size)
    rows = evolve(rows, temperature=rng.uniform(0.5, 1.5, n).astype(np.float32))
    by_count, by_mass, kind = rows.limited(top_k=4), rows.limited(top_p=6), np.arange(n) % 4
    return evolve(
        rows,
        temperature=np.where(kind == 0, 0, rows.temperature).astype(np.float32),
        top_k=np.where(kind == 1, by_count.top_k, 0),
        top_p=np.where(kind == 2, by_mass.top_p, 1).astype(np.float32),
    )
