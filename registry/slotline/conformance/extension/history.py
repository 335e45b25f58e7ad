"""L3: long random histories of requests and steps."""

from __future__ import annotations

import numpy as np

from slotline.core.batch.request import Request
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.extension import MAX_REQUESTS, ExtendedEngine

STEPS = 150
PATIENCE = 50
"""Steps in turn that a row may be left out of."""


@check(Kind.EXTENSION, "extension.history.requests", Level.STATEFUL, explores=True, cost=0.2, profile="mixed")
def history_requests(run: Run) -> None:
    """Requests come, step and leave in any order, rows are used again, and each row gets its turn."""
    engine, running, waited = ExtendedEngine(run), list[Request](), dict[int, int]()
    for step in range(STEPS):
        while len(running) < MAX_REQUESTS and engine.rng.random() < 0.5:
            running.append(engine.join(int(engine.rng.integers(1, 30))))
        if not running:
            continue
        rows = np.array([request.row for request in running], np.int64)
        if engine.has("limit_tokens"):
            limits = engine.limits(rows, engine.rng.integers(1, 20, len(rows)))
            for row, limit in zip(rows.tolist(), limits.tolist(), strict=True):
                waited[row] = 0 if limit else waited.get(row, 0) + 1
                if waited[row] > PATIENCE:
                    raise Failed(f"step {step}: row {row} has waited for {PATIENCE} steps")
        inputs = engine.call("prepare_inputs", engine.inputs(running)) or engine.inputs(running)
        engine.call("plan", inputs)
        if engine.has("process_logits"):
            engine.logits(inputs)
        for request in [request for request in running if engine.rng.random() < 0.2]:
            running.remove(request)
            engine.leave(request)
        engine.call("check")
