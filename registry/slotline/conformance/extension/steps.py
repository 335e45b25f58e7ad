"""Answers in a step: types, shapes, and inputs that nothing writes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.extension import MAX_REQUESTS, ExtendedEngine

SIZES: tuple[Case, ...] = tuple({"requests": count} for count in (0, 1, 5))


def _engine(run: Run, method: str) -> ExtendedEngine:
    """Return an engine if the extension has a method."""
    engine = ExtendedEngine(run)
    if not engine.has(method):
        raise NotApplicable(f"it has no {method}")
    return engine


@check(Kind.EXTENSION, "extension.step.limits", Level.NUMERICS, cases=lambda _: SIZES, cost=0.01)
def step_limits(run: Run) -> None:
    """`limit_tokens` gives an integer from 0 for each row, also for none, and writes neither rows nor counts."""
    engine = _engine(run, "limit_tokens")
    rows = np.array([engine.join(4 + i).row for i in range(run["requests"])], np.int64)
    for counts in (np.ones(len(rows), np.int64), np.arange(len(rows)) * 9 + 1):
        engine.limits(rows, counts)


@check(Kind.EXTENSION, "extension.step.logits", Level.NUMERICS, cases=lambda _: SIZES, cost=0.01)
def step_logits(run: Run) -> None:
    """`process_logits` gives logits of the given shape, dtype and device, also for none, and writes no input."""
    engine = _engine(run, "process_logits")
    engine.logits(engine.inputs([engine.join(4 + i) for i in range(run["requests"])]))


@check(Kind.EXTENSION, "extension.step.schedule", Level.NUMERICS, cases=lambda _: SIZES[1:], cost=0.01)
def step_schedule(run: Run) -> None:
    """`before_step` gives a SchedulerOutput of some of the step's rows in their order, with their tokens."""
    engine = _engine(run, "before_step")
    given = engine.scheduled([engine.join() for _ in range(run["requests"])])
    found = engine.call("before_step", given)
    if not isinstance(found, SchedulerOutput):
        raise Failed(f"before_step gave {found!r:.80}, expected a SchedulerOutput")
    kept = np.isin(given.rows, found.rows)
    if not np.array_equal(given.rows[kept], found.rows):
        raise Failed(f"before_step gave rows {found.rows.tolist()}, of {given.rows.tolist()}")
    if found.num_tokens != found.num_scheduled.sum() or len(found.num_scheduled) != len(found.rows):
        raise Failed(f"before_step gave {found.num_tokens} tokens for {found.num_scheduled.tolist()}")


@check(Kind.EXTENSION, "extension.step.inputs", Level.NUMERICS, cases=lambda _: SIZES[1:], cost=0.01)
def step_inputs(run: Run) -> None:
    """`prepare_inputs` gives ModelInputs, `plan` None, `forward_kwargs` arguments by name, and no tensor is written."""
    engine = ExtendedEngine(run)
    inputs = engine.inputs([engine.join() for _ in range(run["requests"])])
    before = inputs.input_ids.clone(), inputs.positions.clone()
    found = engine.call("prepare_inputs", inputs)
    if engine.has("prepare_inputs") and not isinstance(found, ModelInputs):
        raise Failed(f"prepare_inputs gave {found!r:.80}, expected ModelInputs")
    inputs = found or inputs
    if (planned := engine.call("plan", inputs)) is not None:
        raise Failed(f"plan gave {planned!r:.80}, expected None")
    named = engine.call("forward_kwargs", inputs)
    if engine.has("forward_kwargs") and not (isinstance(named, Mapping) and all(isinstance(k, str) for k in named)):
        raise Failed(f"forward_kwargs gave {named!r:.80}, expected arguments by name")
    if not all(map(torch.equal, before, (inputs.input_ids, inputs.positions))) and found is inputs:
        raise Failed("prepare_inputs wrote into the step's tensors: it gives a copy with other values")


@check(Kind.EXTENSION, "extension.step.order", Level.HOSTILE, cost=0.02)
def step_order(run: Run) -> None:
    """A row's limit and logits do not depend on its place in the batch, nor on the rows beside it."""
    engines = ExtendedEngine(run), ExtendedEngine(run)
    rows = [[engine.join(4 + i).row for i in range(MAX_REQUESTS - 2)] for engine in engines]
    order = np.array(rows[0], np.int64)
    for _ in range(3):
        other = np.random.default_rng(run.seed).permutation(order)
        if engines[0].has("limit_tokens"):
            limits = [engine.limits(own, own + 30) for engine, own in zip(engines, (order, other), strict=True)]
            if dict(zip(order.tolist(), limits[0].tolist(), strict=True)) != dict(
                zip(other.tolist(), limits[1].tolist(), strict=True)
            ):
                raise Failed(f"limits of the rows {order.tolist()} and {other.tolist()} are {limits}")
        if engines[0].has("process_logits"):
            logits = [
                engine.logits(engine.inputs([engine.rows.request(int(row)) for row in own]))
                for engine, own in zip(engines, (order, other), strict=True)
            ]
            if not torch.equal(logits[0][np.argsort(order)], logits[1][np.argsort(other)]):
                raise Failed("logits of a row depend on its place in the batch")
