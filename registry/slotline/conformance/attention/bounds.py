"""Lengths on the host that are upper bounds, as in steps prepared before the accepted drafts are known."""

from __future__ import annotations

from typing import Any

import numpy as np

from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, NotApplicable, Run, check
from slotline.testing.environments.attention import World
from slotline.testing.environments.attention_choice import build, chosen, examine, need_query, world
from slotline.testing.environments.attention_shapes import SHAPES, with_empty_rows


@check(
    Kind.ATTENTION,
    "attention.bounded_lengths",
    Level.HOSTILE,
    cases=lambda _: [{"shape": shape} for shape in ("decode", "verify", "mixed")],
)
def bounded_lengths(run: Run) -> None:
    """With bounded_lengths, the host's lengths may be too large by tokens or pages, and only the device's count."""
    shape = run["shape"]
    if shape != "decode":
        need_query(run.subject, 2)
    _prove(run, lambda p: with_empty_rows(SHAPES[shape](p)))


@check(
    Kind.ATTENTION,
    "attention.bounded_lengths.window",
    Level.HOSTILE,
    needs={"sliding_window": True},
    cases=lambda _: [{"window": window} for window in (2, 9)],
    profile="window",
)
def bounded_lengths_window(run: Run) -> None:
    """The same with a window, whose first key is counted from the device's length."""
    _prove(run, SHAPES["decode"], window=run["window"])


def _prove(run: Run, requests: Any, **fixed: Any) -> None:
    if not run.subject.capabilities.bounded_lengths:
        raise NotApplicable("plans with exact lengths: bounded_lengths is not declared")
    case = chosen(run, requests, **fixed)
    made, backend = world(run, case), build(run, case)
    for more in ((0, 1, 4, 2), (4, 4, 4, 4), (case.block_size + 3, 0, 2, 1)):
        _raise_bounds(made, more)
        examine(run, made, backend)


def _raise_bounds(made: World, more: tuple[int, ...]) -> None:
    """Give the host lengths that are too large, as far as the block table reaches."""
    lens = np.array([length for _, length in made.case.requests], np.int32)
    most = made.block_table.shape[1] * made.case.block_size
    bounds = np.minimum(lens + np.resize(np.array(more, np.int32), len(lens)), most).astype(np.int32)
    made.batch.seq_lens_cpu = np.where(lens > 0, bounds, 0).astype(np.int32)
    made.batch.max_seq_len = int(made.batch.seq_lens_cpu.max(initial=0))
